"""What an evaluation, or the building of a value table, must know of a model that servers have."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from basis_rl.engine import end_tokens
from basis_rl.engine.client import Client


def declared_ends(name: str, config: object, tokenizer: PreTrainedTokenizerBase, revision: str | None) -> list[int]:
    """End tokens as `sample` has them of a loaded model, without loading one."""
    try:
        generation = GenerationConfig.from_pretrained(name, revision=revision or "main")
    except OSError:
        generation = GenerationConfig.from_model_config(config)  # type: ignore[arg-type]
    return end_tokens(generation, tokenizer)


def check_served(url: str, model: str) -> int | None:
    """Tokens that fit into the server at `url`, prompt and completion together; None if it does not say.

    Raises:
        ValueError: there is no server, or it has another model.
    """
    served = Client(url).model()
    if model not in served.names and Path(model).resolve() not in {Path(name).resolve() for name in served.names}:
        raise ValueError(f"The server at {url} has the model {', '.join(sorted(served.names))}, not '{model}'.")
    return served.max_model_len
