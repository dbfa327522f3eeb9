"""A custom baseline that shrinks each prompt's leave-one-out mean towards the mean of the batch.

basis-rl check examples.custom_baseline:Shrinkage
basis-rl train RECIPE.yaml --baseline examples.custom_baseline:Shrinkage --baseline_kwargs.strength 4
"""

import torch
from torch import Tensor

from basis_rl.baselines import CenterScale
from basis_rl.functional.segments import leave_one_out_mean, segment_count


class Shrinkage(CenterScale):
    """``b_i = (n m_i + k m) / (n + k)``: the prompt's n other rollouts have mean m_i, all other rollouts mean m."""

    def __init__(self, strength: float = 2.0) -> None:
        self.strength = strength

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        own = (~rewards.isnan()).double()
        n = segment_count(rewards, group_ids) - own
        batch = leave_one_out_mean(rewards, torch.zeros_like(group_ids))
        group = torch.nan_to_num(leave_one_out_mean(rewards, group_ids), nan=0.0)
        return (n * group + self.strength * batch) / (n + self.strength)
