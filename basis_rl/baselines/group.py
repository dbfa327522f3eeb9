"""Baselines that compare the rollouts of one prompt with each other. All need at least two of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, CenterScale, scorable_rows
from basis_rl.functional.segments import group_mean, group_std, leave_one_out_mean, segment_count
from basis_rl.registry import check_choice
from basis_rl.types import Advantages, RolloutBatch

Over = Literal["group", "batch"]
Form = Literal["analytic", "leave_one_out"]


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
        rewards = batch.rewards.double()
        scored = ~rewards.isnan()
        spread = group_mean((rewards - group_mean(rewards, batch.group_ids)).abs(), batch.group_ids)
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


class Gdpo(Baseline):
    """``A = (S - mean S) / (std S + eps)``, ``S_i = sum_f w_f (r_if - m_gf) / (s_gf + eps)`` (arXiv:2601.05242).

    Mean ``m_gf`` and deviation ``s_gf`` (ddof = 1) of each reward function over the prompt's rollouts, then mean and
    deviation of the weighted sum over the batch; ``eps = 1e-4``. GRPO normalises the sum of the rewards, so that
    different combinations with one sum become one advantage. It is TRL's
    ``multi_objective_aggregation="normalize_then_sum"``. A reward that does not vary within the group adds nothing, a
    function that did not score the rollout neither. The reported baseline is the group's mean of the total reward.

    Departure from TRL: a group with fewer than two scored rollouts gets ``A = 0``, and takes no part in the batch's
    mean and deviation.

    Metric: ``undefined``, the share of such rows among the scored ones.
    """

    requires = frozenset({"reward_parts"})
    min_group_size: int = 2
    uses_own_reward: bool = True
    scales: bool = True
    eps: float = 1e-4

    def advantages(self, batch: RolloutBatch) -> Advantages:
        assert batch.reward_parts is not None
        assert batch.reward_weights is not None
        groups = batch.group_ids
        scorable = scorable_rows(batch)
        rewards = batch.rewards.double().masked_fill(~scorable, torch.nan)
        served = scorable & (segment_count(rewards, groups) >= self.min_group_size)
        total = torch.zeros_like(rewards)
        for part, weight in zip(batch.reward_parts.double().T, batch.reward_weights.tolist(), strict=True):
            own = part.masked_fill(~scorable, torch.nan)
            scaled = (own - group_mean(own, groups)) / (group_std(own, groups) + self.eps)
            total = total + weight * torch.nan_to_num(scaled, nan=0.0)
        # Two zeros where nobody is served, since the mean and deviation of nothing are NaN.
        counted = total[served] if bool(served.any()) else total.new_zeros(2)
        values = torch.where(served, (total - counted.mean()) / (counted.std() + self.eps), 0.0)
        share = float((scorable & ~served).sum() / scorable.sum().clamp(min=1))
        baseline = torch.nan_to_num(group_mean(rewards, groups), nan=0.0)
        return Advantages(values=values, baseline=baseline, metrics={"undefined": share})


class PassAtK(CenterScale):
    """Advantages under which training raises pass@k, the chance that one of k rollouts is right.

    ``form="analytic"`` (Chen et al. 2025, arXiv:2508.10751): with c of the group's n rollouts right, pass@k of all
    subsets of k has the mean ``rho = 1 - C(n-c, k) / C(n, k)`` and the deviation ``sigma = sqrt(rho (1 - rho))``, and a
    rollout gets the mean over the subsets that hold it::

        A_right = (1 - rho) / (sigma + eps)
        A_wrong = (1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / (sigma + eps)          eps = 1e-6

    It needs ``n > k``: with n = k the only subset is the group, and every advantage is 0. A rollout is right if its
    reward is above `threshold`.

    ``form="leave_one_out"`` (Tang et al. 2025, arXiv:2503.19595): k is the number of the group's rollouts, and a
    rollout gets what the best reward loses without it, ``A_i = max_j r_j - max_{j != i} r_j``: the best one its lead
    over the second, the others 0. No scaling. It is unbiased for ``E[max]``, for any reward.

    With KL in the reward, ``r`` is the return in ``leave_one_out``. ``analytic`` refuses it: only which side of the
    threshold a reward is on counts, so that the penalty would do nothing, or make a right rollout wrong.

    Args:
        k: size of the set, >= 1 (``analytic`` only).
        form: see above.
        threshold: in reward units (``analytic`` only).

    Raises:
        ValueError: a parameter out of its range.
    """

    uses_own_reward: bool = True
    # Of the default form and k, as the next one.
    min_group_size: int = 3
    reads_kl: bool = False
    scales: bool = True

    def __init__(self, k: int = 2, form: Form = "analytic", threshold: float = 0.5) -> None:
        check_choice("pass_at_k", "form", form, Form)
        if k < 1:
            raise ValueError(f"pass_at_k: k must be at least 1, got {k}.")
        self.k = k
        self.form = form
        self.threshold = threshold
        self.min_group_size = k + 1 if form == "analytic" else 2
        self.reads_kl = form == "leave_one_out"
        self.scales = form == "analytic"

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """``r_i - A_i``, so that what is left is the advantage."""
        values = torch.full_like(rewards, torch.nan)
        for group in group_ids.unique():
            rows = ((group_ids == group) & ~rewards.isnan()).nonzero().flatten()
            if len(rows) >= self.min_group_size:
                values[rows] = self._analytic(rewards[rows]) if self.form == "analytic" else _leads(rewards[rows])
        return rewards - values

    def _analytic(self, rewards: Tensor) -> Tensor:
        right = rewards > self.threshold
        n = len(rewards)
        c = int(right.sum())
        k = self.k
        # 1 - rho.
        fails = math.comb(n - c, k) / math.comb(n, k)
        others_fail = math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1) if c < n else 0.0
        sigma = math.sqrt(fails * (1 - fails)) + 1e-6
        return torch.where(right, fails / sigma, (fails - others_fail) / sigma).to(rewards)


def _leads(rewards: Tensor) -> Tensor:
    """``max_j r_j - max_{j != i} r_j``, of one group."""
    best = rewards.topk(2)
    lead = torch.zeros_like(rewards)
    lead[best.indices[0]] = best.values[0] - best.values[1]
    return lead
