"""A custom prompt sampler, used with `prompt_sampler: examples.custom_sampler:Harder`.

basis-rl check examples.custom_sampler:Harder
"""

from __future__ import annotations

from torch import Tensor

from basis_rl.samplers import WeightedSampler


class Harder(WeightedSampler):
    """``w_i = (1 - V_i) [V_i > 0.02] + 0.01``: prefers hard prompts, except for those that the policy never solves."""

    def weights(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (1 - mean) * (mean > 0.02) + 0.01
