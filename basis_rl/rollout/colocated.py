"""vLLM's engine in the trainer's own process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def prompt_log_probs(engine: Any, token_ids: list[int]) -> Tensor:
    """``(L - 1,)`` log-probability of each token but the first, given those before it, as `engine` sees it."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    (output,) = engine.generate([{"prompt_token_ids": token_ids}], settings, use_tqdm=False)
    rows = output.prompt_logprobs
    return torch.tensor([rows[i][token_ids[i]].logprob for i in range(1, len(token_ids))])
