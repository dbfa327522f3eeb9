"""The return of a rollout from each token on, with the KL penalty where it is placed in the reward."""

from __future__ import annotations

import torch
from torch import Tensor


def reward_to_go(rewards: Tensor, kl: Tensor | None, action_mask: Tensor) -> Tensor:
    """``G_t = r - sum_{j >= t} KL_j`` over action tokens (gamma = 1, the reward at the end).

    Args:
        rewards: ``(N,)``, NaN = not scored.
        kl: ``(N, T)``, coefficient included, or None.
        action_mask: ``(N, T)`` bool; a penalty outside of it does not count.

    Returns:
        ``(N, T)`` float64: the same number at every token without KL; NaN in rows without a reward.
    """
    total = rewards.double()[:, None].expand(action_mask.shape)
    if kl is None:
        return total
    penalty = torch.where(action_mask, kl.double(), 0.0)
    return total - penalty.flip(1).cumsum(dim=1).flip(1)
