"""Shrinkage: the prompt's own mean drawn towards that of the others, by how noisy it is. Both need two rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines.base import CenterScale, check_state_keys, scorable_rows
from basis_rl.functional.segments import group_mean, group_std, leave_one_out_mean, segment_count
from basis_rl.types import Advantages, RolloutBatch


def _one_row_per_group(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """First row of each group ``(P,)``, and the group of each row ``(N,)``."""
    groups, index = torch.unique(group_ids, return_inverse=True)
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
        noise = (group_std(rewards, group_ids) ** 2 / segment_count(rewards, group_ids))[first]

        def of_others(x: Tensor) -> Tensor:
            return leave_one_out_mean(x, torch.zeros_like(first))

        center = of_others(mean)
        # E[(m - c)^2] with a c of its own for each group; the clamp is for rounding.
        spread = (of_others(mean**2) - center**2).clamp(min=0.0)
        variance = torch.nan_to_num(of_others(noise), nan=0.0)
        total = variance + spread
        return torch.where(total > 1e-12, variance / total.clamp(min=1e-12), 0.0)[index], center[index]

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        own = leave_one_out_mean(rewards, group_ids)
        weight, others = self._weights(rewards, group_ids)
        return torch.where(others.isnan(), own, (1 - weight) * own + weight * others)

    def advantages(self, batch: RolloutBatch) -> Advantages:
        result = super().advantages(batch)
        weight, _ = self._weights(batch.rewards.double().cpu(), batch.group_ids.cpu())
        result.metrics["shrinkage"] = float(torch.nan_to_num(weight, nan=0.0).mean())
        return result


_STATE = ("count", "mean", "spread", "inverse_sizes", "squares", "freedom")


class Ebpo(CenterScale):
    """``b_g = (1 - S_g) m_g + S_g mu``, ``S_g = (sigma^2 / n_g) / (sigma^2 / n_g + tau^2)``, EBPO (arXiv:2602.05165).

    The group's mean is drawn towards ``mu``, the mean over all prompts so far, the more the noisier it is: a group that
    is all wrong gets ``A = -S mu`` rather than 0. ``mu`` and the variance of the groups' means are kept up by
    Welford's algorithm, ``sigma^2`` is the variance within groups (ddof = 1, pooled over all groups so far), and
    ``tau^2``, that between prompts, the variance of the groups' means less what the noise in them explains,
    ``sigma^2 mean(1 / n_g)``, at least 0. All come from the earlier batches; in the first one ``S = 0``. No scaling.

    Implemented from the paper's abstract and published summaries, which give the shrinkage, its form and Welford's
    update of the prior. How the two variances are estimated and that nothing is divided by is decided here: the paper's
    own text was not at hand.

    Metrics: ``prior``, mu; ``shrinkage``, the mean S.
    """

    min_group_size: int = 2
    uses_own_reward: bool = True

    def __init__(self) -> None:
        self.count = self.mean = self.spread = 0.0  # Welford's, over the groups' means
        self.inverse_sizes = self.squares = self.freedom = 0.0

    def _shrinkage(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """``(N,)`` S of each row's group."""
        size = segment_count(rewards, group_ids).clamp(min=1)
        if self.count == 0:
            return torch.zeros_like(size)
        within = self.squares / max(self.freedom, 1.0)
        between = max(0.0, self.spread / max(self.count - 1, 1.0) - within * self.inverse_sizes / self.count)
        noise = within / size
        return torch.where(noise > 0, noise / (noise + between).clamp(min=1e-12), 0.0)

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        shrinkage = self._shrinkage(rewards, group_ids)
        return (1 - shrinkage) * group_mean(rewards, group_ids) + shrinkage * self.mean

    def advantages(self, batch: RolloutBatch) -> Advantages:
        result = super().advantages(batch)
        shrinkage = self._shrinkage(batch.rewards.double().cpu(), batch.group_ids.cpu())
        result.metrics.update(prior=self.mean, shrinkage=float(shrinkage.mean()))
        return result

    def update(self, batch: RolloutBatch) -> None:
        rewards = batch.rewards.double().cpu().masked_fill(~scorable_rows(batch), torch.nan)
        groups = batch.group_ids.cpu()
        first, _ = _one_row_per_group(groups)
        means, sizes = group_mean(rewards, groups)[first], segment_count(rewards, groups)[first]
        # In an order that does not depend on that of the rows, so that the sums are the same to the bit.
        for mean, size in sorted(zip(means[sizes > 0].tolist(), sizes[sizes > 0].tolist(), strict=True)):
            self.count += 1
            away = mean - self.mean
            self.mean += away / self.count
            self.spread += away * (mean - self.mean)
            self.inverse_sizes += 1.0 / size
            self.freedom += size - 1
        self.squares += float(((rewards - group_mean(rewards, groups)) ** 2).nansum())

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys(self, state, _STATE)
        for name in _STATE:
            setattr(self, name, float(state[name]))
