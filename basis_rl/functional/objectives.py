"""How a loss of each token becomes one number: the aggregations of policy losses."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["rollout_mean", "rollout_sum", "micro_batch_mean", "fixed_length", "token_mean"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

# How TRL aggregates the loss of each of its loss types.
OF_LOSS_TYPE: dict[str, Aggregation] = {
    "grpo": "rollout_mean",
    "sapo": "rollout_mean",
    "luspo": "rollout_sum",
    "bnpo": "micro_batch_mean",
    "dr_grpo": "fixed_length",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
}


def aggregate(
    per_token: Tensor, mask: Tensor, aggregation: Aggregation, *, accumulation: float, max_length: int, tokens: Tensor
) -> Tensor:
    """The scalar whose sum over the micro-batches of an optimizer step is the loss.

    ::

        rollout_mean       mean over rollouts of the mean over their tokens
        rollout_sum        mean over rollouts of the sum over their tokens
        micro_batch_mean   mean over the tokens of the micro-batch
        fixed_length       sum over tokens / (rollouts * max_length)
        token_mean         sum over tokens / tokens of the whole optimizer step

    What stands outside the mask has no influence, whatever it is, on the value and on the gradient.

    Args:
        per_token: ``(M, T)``.
        mask: ``(M, T)``, 1 on action tokens.
        aggregation: one of the above.
        accumulation: micro-batches of an optimizer step (not for ``token_mean``, whose `tokens` span all of them).
        max_length: tokens that a rollout may have.
        tokens: action tokens of an optimizer step, over this rank's share.
    """
    kept = torch.where(mask.bool(), per_token, 0.0)
    if aggregation == "token_mean":
        return kept.sum() / tokens
    if aggregation == "micro_batch_mean":
        value = kept.sum() / mask.sum().clamp(min=1.0)
    elif aggregation == "fixed_length":
        value = kept.sum() / (per_token.shape[0] * max_length)
    elif aggregation == "rollout_sum":
        value = kept.sum(-1).mean()
    else:
        assert aggregation == "rollout_mean", aggregation
        value = (kept.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    return value / accumulation
