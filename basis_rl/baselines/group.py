"""Baselines that compare the rollouts of one prompt with each other. All need at least two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, CenterScale, returns, scorable_rows
from basis_rl.functional.segments import group_mean, group_std, leave_one_out_mean, segment_count
from basis_rl.registry import OneOrMore, Positive
from basis_rl.types import Advantages, RolloutBatch

Over = Literal["group", "batch"]
Form = Literal["analytic", "leave_one_out"]
# count, mean, and sum of squared deviations from it.
Moments = tuple[float, float, float]
_NOTHING: Moments = (0.0, 0.0, 0.0)


class _GroupMean(CenterScale):
    """The center is the mean of the prompt's rollouts, the own one included."""

    min_group_size = 2
    uses_own_reward = True

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_mean(rewards, group_ids)


@dataclass(eq=False)
class DrGrpo(_GroupMean):
    """``A_i = alpha (r_i - mean_{j in g(i)} r_j)``, Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), alpha = 1.

    With ``alpha=True`` it is the advantage of GPG (Chu et al. 2025, arXiv:2504.02546): alpha is the number of rollouts
    over the number of those whose group has unequal rewards, so that groups without a signal do not shrink the step. It
    is here, and not in the objective ``gpg``, because it counts over the whole batch, of which an objective sees a
    part. verl's ``gpg`` counts rollouts with a reward other than 0 in its place.

    Metric, with it: ``alpha``.
    """

    alpha: bool = False

    def advantages(self, batch: RolloutBatch) -> Advantages:
        result = super().advantages(batch)
        if not self.alpha:
            return result
        rewards = batch.rewards.double()
        scored = ~rewards.isnan()
        spread = group_mean((rewards - group_mean(rewards, batch.group_ids)).abs(), batch.group_ids)
        factor = float(scored.sum() / (scored & (spread > 1e-9)).sum().clamp(min=1))
        return replace(result, values=factor * result.values, metrics={**result.metrics, "alpha": factor})


@dataclass(eq=False)
class Grpo(_GroupMean):
    """``A_i = (r_i - mean_{j in g(i)} r_j) / (std_{j in g(i)} r_j + eps)``, GRPO (Shao et al. 2024, arXiv:2402.03300).

    The standard deviation has ddof = 1 and ``eps = 1e-4``, as in TRL. With ``over="batch"`` it is that of all rewards
    of the batch, TRL's ``scale_rewards="batch"`` (arXiv:2508.08221).

    Raises:
        ValueError: a parameter out of its range.
    """

    # A group with equal rewards has a standard deviation of 0.
    eps: Positive = 1e-4
    over: Over = "group"
    scales = True

    def scale(self, rewards: Tensor, group_ids: Tensor) -> Tensor | None:
        return group_std(rewards, group_ids if self.over == "group" else torch.zeros_like(group_ids))


class Rloo(CenterScale):
    """``A_i = r_i - mean_{j in g(i), j != i} r_j``, RLOO (Ahmadian et al. 2024, arXiv:2402.14740)."""

    min_group_size: int = 2

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return leave_one_out_mean(rewards, group_ids)


@dataclass(eq=False)
class MaxRl(_GroupMean):
    """``A_i = (r_i - m) / (m + eps)``, m the mean of the prompt's rollouts, MaxRL (arXiv:2602.02710).

    For 0/1 rewards it raises ``log p``, the likelihood of a right answer, in place of p: hard prompts count more. It is
    the series ``-sum_k (1 - p)^k / k`` up to the order G - 1, one less than the paper says: a group without a success
    gets 0, so that the mean that is subtracted from the others is not 0 in expectation. ``eps = 1e-6``.

    Made for rewards >= 0, where ``A < n``, the number of rollouts. What may be negative can have a mean near 0, and A
    would have no bound: a group with a reward below 0 gets 0 and counts as ``undefined``, and KL in the reward is
    refused.
    """

    # A group without a success has the mean 0.
    eps: Positive = 1e-6
    reads_kl = False
    scales = True

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


@dataclass(eq=False)
class PassAtK(CenterScale):
    """Advantages under which training raises pass@k, the chance that one of k rollouts is right.

    ``form="analytic"`` (Chen et al. 2025, arXiv:2508.10751): with c of the group's n rollouts right, pass@k of all
    subsets of k has the mean ``rho = 1 - C(n-c, k) / C(n, k)`` and the deviation ``sigma = sqrt(rho (1 - rho))``, and a
    rollout gets the mean over the subsets that hold it. It needs ``n > k``, else all advantages are 0::

        A_right = (1 - rho) / (sigma + eps)
        A_wrong = (1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / (sigma + eps)          eps = 1e-6

    ``form="leave_one_out"`` (Tang et al. 2025, arXiv:2503.19595): k = n, and a rollout gets what the best reward loses
    without it, ``A_i = max_j r_j - max_{j != i} r_j``. No scaling. Unbiased for ``E[max]``, for any reward.

    With KL in the reward, ``r`` is the return in ``leave_one_out``. ``analytic`` refuses it, since there only the side
    of the threshold counts.

    Args:
        k: size of the set, >= 1 (``analytic`` only).
        form: see above.
        threshold: a rollout is right if its reward is above it (``analytic`` only).

    Raises:
        ValueError: a parameter out of its range.
    """

    k: OneOrMore = 2
    form: Form = "analytic"
    threshold: float = 0.5
    uses_own_reward = True
    # Of the default form and k, as the next ones.
    min_group_size = 3
    reads_kl = False
    scales = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.min_group_size = self.k + 1 if self.form == "analytic" else 2
        self.reads_kl = self.form == "leave_one_out"
        self.scales = self.form == "analytic"

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


def _one_row_per_group(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """First row of each group ``(P,)``, and the group of each row ``(N,)``."""
    groups, index = torch.unique(group_ids, return_inverse=True)
    # Written from the last row to the first, so the first one of each group stays.
    rows = torch.arange(len(group_ids)).flip(0)
    return torch.empty(len(groups), dtype=torch.long).scatter_(0, index.flip(0), rows), index


class JamesStein(CenterScale):
    """``b_i = (1 - l_g) RLOO_i + l_g m_{-g}``, James-Stein baselines (Zeng et al. 2025, arXiv:2511.03710).

    ``RLOO_i`` is the mean of the other rollouts of the prompt, ``m_{-g}`` the mean over the OTHER prompts q of their
    means ``m_q``, and the weight is estimated from the other prompts alone::

        l_g = v^2 / (v^2 + s^2)     v^2 = mean_q var_q / n_q (ddof = 1)     s^2 = mean_q (m_q - m_{-g})^2

    So the own reward is excluded on both levels, and the gradient is unbiased. Where all other prompts have equal means
    without any variance (0 / 0) the weight is 0, and so it is in a batch of one prompt.

    Departures: groups may be ragged, and a prompt counts as one whatever its number of rollouts (the paper has equal
    numbers, where it is the same); the authors' code adds 1e-6 to the denominator of the weight.

    Metric: ``shrinkage``, the mean weight.
    """

    min_group_size: int = 2

    def _weights(self, rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of the other prompts' mean, and that mean, ``(N,)`` each; NaN without other prompts."""
        first, index = _one_row_per_group(group_ids)
        mean = group_mean(rewards, group_ids)[first]
        # The variance of a group's mean.
        noise = (group_std(rewards, group_ids) ** 2 / segment_count(rewards, group_ids))[first]

        # Every group counts as one, whatever its number of rollouts.
        def of_others(x: Tensor) -> Tensor:
            return leave_one_out_mean(x, torch.zeros_like(first))

        center = of_others(mean)
        # E[(m - c)^2] with a c of its own for each group; the clamp is for rounding.
        spread = (of_others(mean**2) - center**2).clamp(min=0.0)
        variance = of_others(noise)
        total = variance + spread
        return torch.where(total > 1e-12, variance / total, 0.0)[index], center[index]

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        own = leave_one_out_mean(rewards, group_ids)
        weight, others = self._weights(rewards, group_ids)
        return torch.where(others.isnan(), own, (1 - weight) * own + weight * others)

    def advantages(self, batch: RolloutBatch) -> Advantages:
        result = super().advantages(batch)
        weight, _ = self._weights(returns(batch), batch.group_ids)
        result.metrics["shrinkage"] = float(weight.mean())
        return result


def _with(past: Moments, x: Tensor) -> Moments:
    """The moments of `past` and ``x (M,)`` together (Chan et al. 1979), the same to the bit in any order of x."""
    if not len(x):
        return past
    # A sum of floats depends on its order, and the order of rows means nothing.
    ordered = x.sort().values
    count, mean, squares = past
    there = float(len(x))
    own = float(ordered.mean())
    total = count + there
    # The pooled squares are those within both parts and that between their means.
    away = own - mean
    within = float(((ordered - own) ** 2).sum())
    return total, mean + away * there / total, squares + within + away**2 * count * there / total


def _variance(moments: Moments) -> float:
    """Sample variance (ddof = 1), 0 of fewer than two."""
    return moments[2] / (moments[0] - 1) if moments[0] > 1 else 0.0


@dataclass(eq=False)
class Ebpo(CenterScale):
    """``A_i = (a_i - mean a) / (std a + eps)``, ``a_i = r_i - (1 - S_g) m_g - S_g mu``, EBPO (arXiv:2602.05165).

    The group's mean m_g is drawn towards the mean mu of all rewards of the run, the more the noisier it is, so a group
    that is all wrong is discouraged too::

        S_g = (sigma^2 / n_g) / (sigma^2 / n_g + tau^2)

    ``sigma^2`` is the variance of all rewards and ``tau^2`` that of the groups' means (ddof = 1), both over the run up
    to this batch, which is included. The advantages are normalised over the batch (ddof = 0). As the paper remarks,
    tau^2 holds the noise of the groups' means, so S is less than what would give the least error; and sigma^2, the
    variance of the rewards rather than that within groups, makes it more.

    Departures: groups may be ragged; the paper leaves ddof open.

    Args:
        eps: added to the batch's standard deviation, > 0.

    Metrics: ``prior``, mu; ``shrinkage``, the mean S.

    Raises:
        ValueError: eps <= 0.
    """

    # Equal advantages have a deviation of 0.
    eps: Positive = 1e-6
    min_group_size = 2
    uses_own_reward = True
    scales = True
    kept = ("rewards", "means")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rewards = self.means = _NOTHING

    def _moments(self, rewards: Tensor, group_ids: Tensor) -> tuple[Moments, Moments]:
        """Of all rewards and of the groups' means, this batch included."""
        first, _ = _one_row_per_group(group_ids)
        means = group_mean(rewards, group_ids)[first]
        return _with(self.rewards, rewards[~rewards.isnan()]), _with(self.means, means[~means.isnan()])

    def _shrinkage(self, rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, float]:
        """``(N,)`` S of each row's group, and mu."""
        everything, means = self._moments(rewards, group_ids)
        noise = _variance(everything) / segment_count(rewards, group_ids).clamp(min=1)
        return torch.where(noise > 0, noise / (noise + _variance(means)).clamp(min=1e-12), 0.0), everything[1]

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        shrinkage, prior = self._shrinkage(rewards, group_ids)
        return (1 - shrinkage) * group_mean(rewards, group_ids) + shrinkage * prior

    def advantages(self, batch: RolloutBatch) -> Advantages:
        result = super().advantages(batch)
        rewards = returns(batch)
        groups = batch.group_ids
        used = scorable_rows(batch) & (segment_count(rewards, groups) >= self.min_group_size)
        # `scales`: the advantages of the whole batch are normalised, over rows that count.
        raw = result.values[used] if bool(used.any()) else torch.zeros(1, dtype=torch.float64)
        values = torch.where(used, (result.values - raw.mean()) / (raw.std(correction=0) + self.eps), 0.0)
        shrinkage, prior = self._shrinkage(rewards, groups)
        metrics = {**result.metrics, "prior": prior, "shrinkage": float(shrinkage.mean())}
        return Advantages(values=values, baseline=result.baseline, metrics=metrics)

    def update(self, batch: RolloutBatch) -> None:
        self.rewards, self.means = self._moments(returns(batch), batch.group_ids)
