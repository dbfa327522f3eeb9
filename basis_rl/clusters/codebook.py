"""`PromptClusters`: which prompts share their history in BV-Blend, fixed before training."""

from __future__ import annotations

import datetime
import hashlib
import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from basis_rl.names import require_extra
from basis_rl.run.artefacts import Kind, versions

KIND = Kind("prompt codebook", "clusters.parquet", 1, "basis-rl clusters RECIPE")
_CENTROIDS = "centroids.parquet"
DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
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
            said = f"could not be loaded ({type(error).__name__}: {str(error)[:200]})"
            form = "a sentence-transformers model, a Hub id or a folder"
            raise ValueError(f"The encoder '{name_or_path}' {said}. It must be {form}.") from error

    @property
    def revision(self) -> str | None:
        """The commit of a Hub model, None for a folder."""
        config = getattr(getattr(self.model[0], "auto_model", None), "config", None)
        return getattr(config, "_commit_hash", None)

    def __call__(self, texts: Sequence[str], *, progress: bool = False) -> np.ndarray:
        """``(P, D)`` float32, rows of length 1. Texts beyond the model's maximum length are cut, as it does."""
        settings = {"batch_size": 32, "normalize_embeddings": True, "convert_to_numpy": True}
        return self.model.encode(list(texts), show_progress_bar=progress, **settings).astype(np.float32)


class PromptClusters:
    """``prompt -> argmin_j |E(prompt) - c_j|^2``: a frozen encoder E and a K-means codebook c (BV-Blend, Eq. 5).

    The prompts that it was built from are looked up by their id. Others are embedded when they turn up, on the CPU, by
    the same encoder: that it is the same is seen from its embedding of a fixed sentence.

    On disk it is a folder: ``clusters.parquet`` (prompt_id, cluster), ``centroids.parquet`` (K unit vectors' means) and
    ``metadata.json`` (encoder and revision, K, seed, iterations, inertia, versions, date).

    Attributes:
        assignments: prompt id -> cluster, of the prompts that it was built from.
        centroids: ``(K, D)``, or None for a plain mapping, which knows no other prompts.
        provenance: how it was built.
        source: where it came from, for messages.
    """

    def __init__(
        self,
        assignments: Mapping[str, int],
        *,
        centroids: np.ndarray | None = None,
        provenance: Mapping[str, Any] | None = None,
        source: str = "in memory",
    ) -> None:
        if not assignments and centroids is None:
            raise ValueError("clusters is empty; it maps every prompt id to its cluster.")
        self.assignments = {prompt_id: int(cluster) for prompt_id, cluster in assignments.items()}
        self.centroids = centroids
        self.provenance = dict(provenance or {})
        self.source = source
        self._encoder: Encoder | None = None
        self._embedded: dict[str, int] = {}

    @classmethod
    def build(
        cls,
        prompts: Mapping[str, str],
        encoder: str = DEFAULT_ENCODER,
        num_clusters: int | None = None,
        *,
        revision: str | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> PromptClusters:
        """Embed `prompts` (id -> text) and cluster the embeddings by scikit-learn's K-means (best of 4 starts).

        Args:
            prompts: those of one text are embedded and clustered as one; P is the number of texts.
            encoder: a sentence-transformers model, Hub id or folder.
            num_clusters: K, 1 <= K <= P; default `default_num_clusters`.
            revision: of a Hub model.
            seed: of K-means.
            progress: show a bar while embedding.

        Raises:
            ValueError: K out of range, or the encoder cannot be loaded.
        """
        from sklearn.cluster import KMeans

        # Duplicates would pull a centroid towards their text.
        texts = list(dict.fromkeys(prompts.values()))
        k = default_num_clusters(len(texts)) if num_clusters is None else num_clusters
        if not 1 <= k <= len(texts):
            raise ValueError(f"num_clusters must be from 1 to the number of prompts ({len(texts)}), got {k}.")
        model = Encoder(encoder, revision, "cuda" if torch.cuda.is_available() else "cpu")
        vectors = model(texts, progress=progress)
        fitted = KMeans(n_clusters=k, n_init=4, random_state=seed).fit(vectors)
        provenance = {
            "encoder": encoder,
            "revision": model.revision,
            "num_clusters": k,
            "num_prompts": len(texts),
            "seed": seed,
            "iterations": int(fitted.n_iter_),
            "inertia": float(fitted.inertia_),
            "probe": model([PROBE])[0].tolist(),
            "date": datetime.date.today().isoformat(),
            "versions": versions("sentence-transformers", "scikit-learn"),
        }
        centroids = fitted.cluster_centers_.astype(np.float32)
        cluster = dict(zip(texts, fitted.labels_, strict=True))
        found = {name: cluster[text] for name, text in prompts.items()}
        return cls(found, centroids=centroids, provenance=provenance)

    def __len__(self) -> int:
        """K."""
        return len(set(self.assignments.values())) if self.centroids is None else len(self.centroids)

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self.assignments

    @property
    def digest(self) -> str:
        """SHA-256 over assignments and centroids: equal codebooks have equal ones, wherever they lie."""
        digest = hashlib.sha256(b"" if self.centroids is None else self.centroids.tobytes())
        for prompt_id, cluster in sorted(self.assignments.items()):
            digest.update(f"{prompt_id}:{cluster}\n".encode())
        return digest.hexdigest()

    @property
    def needs_texts(self) -> bool:
        """Whether prompts that it was not built from can be assigned, by their text."""
        return self.centroids is not None

    def load_encoder(self) -> Encoder:
        """The encoder that the codebook was built with.

        Raises:
            ValueError: it cannot be loaded, or gives other embeddings than it gave then.
        """
        if self._encoder is None:
            book = f"the prompt codebook ({self.source})"
            again = f"Build it again: `{KIND.command}`."
            if not {"encoder", "revision", "probe"} <= self.provenance.keys():
                unknown = "does not say which encoder it was built with"
                raise ValueError(f"New prompts have no cluster, since {book} {unknown}. {again}")
            name = self.provenance["encoder"]
            encoder = Encoder(name, self.provenance["revision"])
            difference = float(np.abs(encoder([PROBE])[0] - np.asarray(self.provenance["probe"])).max())
            # Another precision or device is well below, another model above.
            if difference > 1e-2:
                off = f"its embedding of a fixed sentence is {difference:.3f} off"
                raise ValueError(f"The encoder '{name}' is not the one that {book} was built with: {off}. {again}")
            self._encoder = encoder
        return self._encoder

    def assign(self, prompt_ids: Sequence[str], texts: Sequence[str] | None = None) -> list[int]:
        """The cluster of each prompt.

        Args:
            prompt_ids: N ids.
            texts: the prompts themselves, N, to embed those whose id is not known.

        Raises:
            ValueError: an id is unknown, and there is no codebook or no text.
        """
        known = ChainMap(self.assignments, self._embedded)
        new = {prompt_id: row for row, prompt_id in enumerate(prompt_ids) if prompt_id not in known}
        if new:
            if self.centroids is None or texts is None:
                raise ValueError(f"prompt_id '{next(iter(new))}' has no cluster ({self.source}).")
            vectors = self.load_encoder()([texts[row] for row in new.values()])
            self._embedded.update(zip(new, self.nearest(vectors), strict=True))
        return [known[prompt_id] for prompt_id in prompt_ids]

    def nearest(self, vectors: np.ndarray) -> list[int]:
        """The cluster whose centroid is nearest to each of the vectors ``(P, D)``."""
        assert self.centroids is not None
        centroids = self.centroids.astype(np.float64)
        # |v|^2 is left out: it is the same for all centroids.
        distance = (centroids**2).sum(axis=1) - 2.0 * vectors.astype(np.float64) @ centroids.T
        return distance.argmin(axis=1).tolist()

    def save(self, path: str | Path) -> Path:
        """Write the folder `path`, replacing a codebook that is there."""
        clusters = pa.table({"prompt_id": list(self.assignments), "cluster": list(self.assignments.values())})
        tables = {KIND.main_file: clusters}
        if self.centroids is not None:
            tables[_CENTROIDS] = pa.table({"centroid": [row.tolist() for row in self.centroids]})
        return KIND.write(Path(path), tables, {"provenance": self.provenance})

    @classmethod
    def load(cls, path_or_hub_id: str | Path, *, revision: str | None = None) -> PromptClusters:
        """A codebook from a folder, or from a dataset repository on the Hub (``owner/name``).

        Raises:
            ValueError: neither a codebook's folder nor a repository that can be read, or a damaged one.
        """
        folder, metadata = KIND.open(path_or_hub_id, revision)
        with KIND.naming_damage(path_or_hub_id):
            return cls._read(folder, metadata["provenance"], str(path_or_hub_id))

    @classmethod
    def _read(cls, folder: Path, provenance: Mapping[str, Any], source: str) -> PromptClusters:
        if not isinstance(provenance, Mapping):
            raise ValueError("its provenance is not a mapping")
        table = pq.read_table(folder / KIND.main_file).to_pydict()
        assignments = dict(zip(table["prompt_id"], table["cluster"], strict=True))
        if len(assignments) < len(table["prompt_id"]) or not all(isinstance(name, str) for name in assignments):
            raise ValueError("a prompt_id occurs twice, or is not a string")
        centroids = None
        most = math.inf
        if (folder / _CENTROIDS).is_file():
            centroids = np.asarray(pq.read_table(folder / _CENTROIDS).to_pydict()["centroid"], np.float32)
            most = len(centroids)
            if centroids.ndim != 2 or not np.isfinite(centroids).all():
                raise ValueError("its centroids are no vectors of finite numbers")
        if not all(type(cluster) is int and 0 <= cluster < most for cluster in assignments.values()):
            raise ValueError("a cluster is none of its clusters")
        return cls(assignments, centroids=centroids, provenance=provenance, source=source)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the codebook as a dataset repository and return its address."""
        return KIND.push(self.save, repo_id, private=private, token=token)


def default_num_clusters(prompts: int, rollouts: int = 512) -> int:
    """K for P prompts and N rollouts per batch: N / 16, but at most P / 25.

    With BV-Blend's decay of 0.9 a cluster's history is little more than its last batch, which should hold some 16
    rollouts; clusters of fewer than 25 prompts overfit (`studies.bv_blend_study`, on MATH's training problems).
    """
    return max(1, min(rollouts // 16, prompts // 25))
