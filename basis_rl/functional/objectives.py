"""How a loss of each token becomes one number: the aggregations of TRL's loss types."""

from __future__ import annotations

from torch import Tensor


def aggregate(
    per_token: Tensor, mask: Tensor, loss_type: str, *, accumulation: float, max_length: int, tokens: Tensor
) -> Tensor:
    """The scalar whose sum over the micro-batches of an optimizer step is the loss.

    ::

        grpo, sapo           mean over rollouts of the mean over their tokens
        bnpo                 mean over the tokens of the micro-batch
        dr_grpo              sum over tokens / (rollouts * max_length)
        luspo                mean over rollouts of the sum over their tokens
        dapo, cispo, vespo   sum over tokens / tokens of the whole optimizer step

    Args:
        per_token: ``(B, T)``.
        mask: ``(B, T)``, 1 on action tokens.
        loss_type: TRL's name.
        accumulation: micro-batches of an optimizer step (not for the last line, whose `tokens` span all of them).
        max_length: tokens that a completion may have.
        tokens: action tokens of an optimizer step, over this rank's share.
    """
    total = (per_token * mask).sum()
    if loss_type in ("dapo", "cispo", "vespo"):
        return total / tokens
    if loss_type == "bnpo":
        value = total / mask.sum().clamp(min=1.0)
    elif loss_type == "dr_grpo":
        value = total / (per_token.shape[0] * max_length)
    elif loss_type == "luspo":
        value = (per_token * mask).sum(-1).mean()
    else:
        assert loss_type in ("grpo", "sapo"), loss_type
        value = ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    return value / accumulation
