"""GDPO: several rewards, each normalised for itself."""

from __future__ import annotations

import torch

from basis_rl.baselines.base import Baseline, scorable_rows
from basis_rl.functional.segments import group_mean, group_std, segment_count
from basis_rl.types import Advantages, RolloutBatch


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
        groups = batch.group_ids.cpu()
        scorable = scorable_rows(batch)
        rewards = batch.rewards.double().cpu().masked_fill(~scorable, torch.nan)
        served = scorable & (segment_count(rewards, groups) >= self.min_group_size)
        total = torch.zeros_like(rewards)
        for part, weight in zip(batch.reward_parts.double().cpu().T, batch.reward_weights.tolist(), strict=True):
            own = part.masked_fill(~scorable, torch.nan)
            scaled = (own - group_mean(own, groups)) / (group_std(own, groups) + self.eps)
            total = total + weight * torch.nan_to_num(scaled, nan=0.0)
        # Two zeros where nobody is served, since the mean and deviation of nothing are NaN.
        counted = total[served] if bool(served.any()) else total.new_zeros(2)
        values = torch.where(served, (total - counted.mean()) / (counted.std() + self.eps), 0.0)
        share = float((scorable & ~served).sum() / scorable.sum().clamp(min=1))
        baseline = torch.nan_to_num(group_mean(rewards, groups), nan=0.0)
        return Advantages(values=values, baseline=baseline, metrics={"undefined": share})
