"""Shrinkage: the prompt's own mean drawn towards that of the others, by how noisy it is. Both need two rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines.base import CenterScale, check_state_keys, returns, scorable_rows
from basis_rl.functional.segments import group_mean, group_std, leave_one_out_mean, segment_count
from basis_rl.types import Advantages, RolloutBatch


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
        weight, _ = self._weights(batch.rewards.double(), batch.group_ids)
        result.metrics["shrinkage"] = float(weight.mean())
        return result


# count, mean, and sum of squared deviations from it.
Moments = tuple[float, float, float]
_NOTHING: Moments = (0.0, 0.0, 0.0)


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

    min_group_size: int = 2
    uses_own_reward: bool = True
    scales: bool = True

    def __init__(self, eps: float = 1e-6) -> None:
        if not eps > 0:
            raise ValueError(f"ebpo: eps must be positive, got {eps}: equal advantages have a deviation of 0.")
        self.eps = eps
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
        rewards = _returns(batch)
        groups = batch.group_ids
        used = ~rewards.isnan() & (segment_count(rewards, groups) >= self.min_group_size)
        # `scales`: the advantages of the whole batch are normalised, over rows that count.
        raw = result.values[used] if bool(used.any()) else torch.zeros(1, dtype=torch.float64)
        values = torch.where(used, (result.values - raw.mean()) / (raw.std(correction=0) + self.eps), 0.0)
        shrinkage, prior = self._shrinkage(rewards, groups)
        metrics = {**result.metrics, "prior": prior, "shrinkage": float(shrinkage.mean())}
        return Advantages(values=values, baseline=result.baseline, metrics=metrics)

    def update(self, batch: RolloutBatch) -> None:
        self.rewards, self.means = self._moments(_returns(batch), batch.group_ids)

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards), "means": list(self.means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys(self, state, ("rewards", "means"))
        self.rewards = tuple(state["rewards"])
        self.means = tuple(state["means"])


def _returns(batch: RolloutBatch) -> Tensor:
    """``(N,)`` the return of each rollout, NaN where it cannot be scored."""
    return returns(batch).masked_fill(~scorable_rows(batch), torch.nan)
