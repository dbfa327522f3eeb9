"""Baselines from the rollouts of the same prompt. All need at least two of them."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from basis_rl.baselines.base import CenterScale
from basis_rl.functional.segments import group_mean, group_std, leave_one_out_mean


class DrGrpo(CenterScale):
    """``A_i = r_i - mean_{j in g(i)} r_j``, Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""

    scope: ClassVar[Literal["batch", "group"]] = "group"
    min_group_size: ClassVar[int] = 2
    uses_own_reward: ClassVar[bool] = True

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_mean(rewards, group_ids)


class Grpo(DrGrpo):
    """``A_i = (r_i - mean_{j in g(i)} r_j) / (std_{j in g(i)} r_j + eps)``, GRPO (Shao et al. 2024, arXiv:2402.03300).

    The standard deviation has ddof = 1 and ``eps = 1e-4``, as in TRL.
    """

    def __init__(self, eps: float = 1e-4) -> None:
        if not eps > 0:
            raise ValueError(f"grpo: eps must be positive, got {eps}: a group with equal rewards has std 0.")
        self.eps = eps

    def scale(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_std(rewards, group_ids)


class Rloo(CenterScale):
    """``A_i = r_i - mean_{j in g(i), j != i} r_j``, RLOO (Ahmadian et al. 2024, arXiv:2402.14740)."""

    scope: ClassVar[Literal["batch", "group"]] = "group"
    min_group_size: ClassVar[int] = 2

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return leave_one_out_mean(rewards, group_ids)
