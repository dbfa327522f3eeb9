"""Baselines from the rollouts of the same prompt. All need at least two of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import CenterScale
from basis_rl.functional.segments import group_mean, group_std, leave_one_out_mean
from basis_rl.registry import check_choice
from basis_rl.types import Advantages, RolloutBatch

Over = Literal["group", "batch"]


class DrGrpo(CenterScale):
    """``A_i = alpha (r_i - mean_{j in g(i)} r_j)``, Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), alpha = 1.

    With ``alpha=True`` it is the advantage of GPG (Chu et al. 2025, arXiv:2504.02546): alpha is the number of rollouts
    over the number of those whose group has unequal rewards, so that groups without a signal do not shrink the step. It
    is here, and not in the objective ``gpg``, because it counts over the whole batch, of which an objective sees a
    part. verl's ``gpg`` counts rollouts with a reward other than 0 in its place.

    Metric, with it: ``alpha``.
    """

    min_group_size: int = 2
    uses_own_reward: bool = True

    def __init__(self, alpha: bool = False) -> None:
        self.alpha = alpha

    def advantages(self, batch: RolloutBatch) -> Advantages:
        result = super().advantages(batch)
        if not self.alpha:
            return result
        rewards = batch.rewards.double().cpu()
        scored = ~rewards.isnan()
        spread = group_mean((rewards - group_mean(rewards, batch.group_ids.cpu())).abs(), batch.group_ids.cpu())
        factor = float(scored.sum() / (scored & (spread > 1e-9)).sum().clamp(min=1))
        return replace(result, values=factor * result.values, metrics={**result.metrics, "alpha": factor})

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_mean(rewards, group_ids)


class Grpo(DrGrpo):
    """``A_i = (r_i - mean_{j in g(i)} r_j) / (std_{j in g(i)} r_j + eps)``, GRPO (Shao et al. 2024, arXiv:2402.03300).

    The standard deviation has ddof = 1 and ``eps = 1e-4``, as in TRL. With ``over="batch"`` it is that of all rewards
    of the batch, TRL's ``scale_rewards="batch"`` (arXiv:2508.08221).

    Raises:
        ValueError: a parameter out of its range.
    """

    scales: bool = True

    def __init__(self, eps: float = 1e-4, over: Over = "group") -> None:
        if not eps > 0:
            raise ValueError(f"grpo: eps must be positive, got {eps}: a group with equal rewards has std 0.")
        check_choice("grpo", "over", over, Over)
        super().__init__()
        self.eps = eps
        self.over = over

    def scale(self, rewards: Tensor, group_ids: Tensor) -> Tensor | None:
        return group_std(rewards, group_ids if self.over == "group" else torch.zeros_like(group_ids))


class Rloo(CenterScale):
    """``A_i = r_i - mean_{j in g(i), j != i} r_j``, RLOO (Ahmadian et al. 2024, arXiv:2402.14740)."""

    min_group_size: int = 2

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return leave_one_out_mean(rewards, group_ids)


class Quantile(Grpo):
    """``A_i = (r_i - Q_K) / (std + eps)``, Q_K the K-quantile of the group's rewards, QAE (arXiv:2509.22611).

    ``Q_K`` is the least reward that at least a share K of the group does not exceed. For 0/1 rewards it is 0 if at most
    ``1 - K`` of the rollouts are right, and then only those teach, else 1, and only the wrong ones do (Wu et al. 2025).

    Args:
        level: K in (0, 1]; the paper takes 0.4.
        normalize: whether to divide by the standard deviation, as the paper does.
        eps: see `Grpo`.

    Raises:
        ValueError: a parameter out of its range.
    """

    def __init__(self, level: float = 0.4, normalize: bool = True, eps: float = 1e-4) -> None:
        super().__init__(eps)
        if not 0 < level <= 1:
            raise ValueError(f"quantile: level must be in (0, 1], got {level}.")
        self.level = level
        self.normalize = normalize
        self.scales = normalize

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        center = torch.full_like(rewards, torch.nan)
        for group in group_ids.unique():
            rows = group_ids == group
            own = rewards[rows & ~rewards.isnan()].sort().values
            if len(own):
                center[rows] = own[max(1, math.ceil(self.level * len(own) - 1e-9)) - 1]
        return center

    def scale(self, rewards: Tensor, group_ids: Tensor) -> Tensor | None:
        return super().scale(rewards, group_ids) if self.normalize else None


class MaxRl(DrGrpo):
    """``A_i = (r_i - m) / (m + eps)``, m the mean of the prompt's rollouts, MaxRL (arXiv:2602.02710).

    For 0/1 rewards it raises ``log p``, the likelihood of a right answer, in place of p: hard prompts count more. It is
    the series ``-sum_k (1 - p)^k / k`` up to the order G - 1, one less than the paper says: a group without a success
    gets 0, so that the mean that is subtracted from the others is not 0 in expectation. ``eps = 1e-6``.

    Made for rewards >= 0, where ``A < n``, the number of rollouts. What may be negative can have a mean near 0, and A
    would have no bound: a group with a reward below 0 gets 0 and counts as ``undefined``, and KL in the reward is
    refused.
    """

    reads_kl: bool = False
    scales: bool = True

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        if not eps > 0:
            raise ValueError(f"max_rl: eps must be positive, got {eps}: a group without a success has the mean 0.")
        self.eps = eps

    def scale(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        mean = group_mean(rewards, group_ids)
        negative = group_mean((rewards < 0).double(), group_ids) > 0
        return torch.where(mean > 0, mean, torch.inf).where(~negative, torch.nan)
