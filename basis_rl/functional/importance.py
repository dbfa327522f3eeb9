"""Importance weights of rollouts that another policy, or another engine, has sampled."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def importance_weights(
    log_probs: Tensor, sampled: Tensor, mask: Tensor, mode: str, lowest: float | None, highest: float | None
) -> Tensor:
    """``w = pi(y) / pi_rollout(y)``, bounded: ``(B, T)`` of each token, or ``(B, 1)`` of each rollout's product.

    Args:
        log_probs: ``(B, T)`` of the trained policy.
        sampled: ``(B, T)`` of the engine that sampled; NaN (unknown) counts as equal to `log_probs`.
        mask: ``(B, T)``, 1 on action tokens.
        mode: ``token_`` or ``sequence_``, then ``truncate`` (weights are clamped into the bounds) or ``mask`` (weights
            outside of them are 0), as TRL's ``vllm_importance_sampling_mode``.
        lowest: bound from below; None is none.
        highest: bound from above.
    """
    difference = ((log_probs - sampled) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence_"):
        difference = difference.sum(dim=-1, keepdim=True)
    weights = difference.exp()
    low = -math.inf if lowest is None else lowest
    high = math.inf if highest is None else highest
    if mode.endswith("_truncate"):
        return weights.clamp(low, high)
    return torch.where((weights < low) | (weights > high), 0.0, weights)
