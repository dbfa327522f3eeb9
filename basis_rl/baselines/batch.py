"""Baselines that are one number for the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from basis_rl.baselines.base import CenterScale
from basis_rl.functional.segments import group_mean


class NoBaseline(CenterScale):
    """``A_i = r_i``: REINFORCE without a baseline, the "vanilla" rows of the BASIS paper."""

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return torch.zeros_like(rewards)


class BatchMean(CenterScale):
    """``A_i = r_i - (1/N) sum_j r_j``, the mean over all scored rollouts of the batch, the own one included.

    The BASIS paper's "REINFORCE++" rows are this, without any division by a standard deviation (its Appendix A).
    """

    uses_own_reward: bool = True

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_mean(rewards, torch.zeros_like(group_ids))


class WReinforce(CenterScale):
    """``A_i = positive r_i - (1 - r_i)``: a right rollout counts `positive`, a wrong one -1 (arXiv:2506.01347).

    Weighted REINFORCE (Zhu et al. 2025): no baseline, and what is right is reinforced ten times less than what is wrong
    is punished, which keeps the policy's diversity. ``positive=0`` is the paper's negative-sample reinforcement alone.
    For rewards between 0 and 1 it is linear in between, which is not the paper's. It is made for rewards from 0 to 1:
    with 1 and -1 a wrong rollout gets ``-0.1 - 2 = -2.1``, so give 0 in place of -1.

    Raises:
        ValueError: a negative weight.
    """

    uses_own_reward: bool = True

    def __init__(self, positive: float = 0.1) -> None:
        if not positive >= 0:
            raise ValueError(f"w_reinforce: positive must be at least 0, got {positive}.")
        self.positive = positive

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return 1.0 - self.positive * rewards
