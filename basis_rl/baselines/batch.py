"""Baselines that are one number for the whole batch."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import CenterScale
from basis_rl.functional.segments import group_mean


class NoBaseline(CenterScale):
    """``A_i = r_i``: REINFORCE without a baseline, the "vanilla" rows of the BASIS paper."""

    scope: ClassVar[Literal["batch", "group"]] = "group"

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return torch.zeros_like(rewards)


class BatchMean(CenterScale):
    """``A_i = r_i - (1/N) sum_j r_j``, the mean over all scored rollouts of the batch, the own one included.

    The BASIS paper's "REINFORCE++" rows are this, without any division by a standard deviation (its Appendix A).
    """

    uses_own_reward: ClassVar[bool] = True

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_mean(rewards, torch.zeros_like(group_ids))
