"""Sentence embeddings by any sentence-transformers model, of the Hub or of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from basis_rl.names import require_extra

# Embedded when a codebook is built and when it is used, to tell whether the encoder is still the same.
PROBE = "What is the sum of the first ten odd numbers?"


class Encoder:
    """``text -> unit vector``, frozen.

    Args:
        name_or_path: a sentence-transformers model.
        revision: of a Hub model.
        device: where it runs; the default is the CPU, which a policy in training leaves free.

    Raises:
        ValueError: sentence-transformers is not installed, or the model cannot be loaded.
    """

    def __init__(self, name_or_path: str, revision: str | None = None, device: str | torch.device = "cpu") -> None:
        require_extra("sentence_transformers", "Embedding prompts")
        from sentence_transformers import SentenceTransformer

        try:
            self.model: Any = SentenceTransformer(name_or_path, revision=revision, device=str(device))
        except Exception as error:
            raise ValueError(
                f"The encoder '{name_or_path}' could not be loaded ({type(error).__name__}: {str(error)[:200]}). It "
                "must be a sentence-transformers model, a Hub id or a folder."
            ) from error

    @property
    def revision(self) -> str | None:
        """The commit of a Hub model, None for a folder."""
        config = getattr(getattr(self.model[0], "auto_model", None), "config", None)
        commit: str | None = getattr(config, "_commit_hash", None)
        return commit

    def __call__(self, texts: Sequence[str], *, progress: bool = False) -> np.ndarray:
        """``(P, D)`` float32, rows of length 1. Texts beyond the model's maximum length are cut, as it does."""
        vectors: np.ndarray = self.model.encode(
            list(texts), batch_size=32, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=progress
        )
        return vectors.astype(np.float32)
