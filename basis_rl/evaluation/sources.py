"""Where the completions of an evaluation come from: this process, or vLLM servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from basis_rl.evaluation.runner import Generate
from basis_rl.rollout import Completion, Sampling, end_tokens, sample, sample_servers
from basis_rl.rollout.client import request_seed, served_model


def from_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, batch_size: int = 64
) -> Generate:
    """Transformers in this process. The seed is that of the whole call: rollouts depend on what is drawn together."""

    def generate(
        prompts: Sequence[Sequence[int]], keys: Sequence[str], sampling: Sampling, num_rollouts: int
    ) -> Iterator[tuple[int, list[Completion]]]:
        torch.manual_seed(seed)
        return sample(model, tokenizer, prompts, sampling, num_samples=num_rollouts, batch_size=batch_size)

    return generate


def from_servers(
    urls: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    stop_token_ids: Sequence[int] = (),
    timeout: float | None = None,
) -> Generate:
    """vLLM servers (`sample_servers`); each problem has a seed of its own, by its id.

    All requests are sent at once and wait within vLLM, which counts as well: `timeout`, in seconds for all rollouts of
    a problem, is by default half a second a token of the longest rollout, and no less than half an hour.
    """

    def generate(
        prompts: Sequence[Sequence[int]], keys: Sequence[str], sampling: Sampling, num_rollouts: int
    ) -> Iterator[tuple[int, list[Completion]]]:
        seeds = [request_seed(seed, key) for key in keys]
        ends = list(stop_token_ids)
        return sample_servers(
            urls,
            tokenizer,
            prompts,
            sampling,
            num_samples=num_rollouts,
            seeds=seeds,
            stop_token_ids=ends,
            timeout=timeout or max(1800.0, 0.5 * sampling.max_new_tokens),
        )

    return generate


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
    served = served_model(url)
    names = {str(served.get("root")), str(served.get("id"))}
    if model not in names and str(Path(model).resolve()) not in {str(Path(name).resolve()) for name in names}:
        raise ValueError(f"The server at {url} has the model {', '.join(sorted(names))}, not '{model}'.")
    limit: int | None = served.get("max_model_len")
    return limit
