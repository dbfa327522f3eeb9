"""Thompson sampling: a draw from the belief, nearest to a target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from basis_rl.functional.selection import effective_number
from basis_rl.samplers.base import Draw, PromptSampler, ValueBelief, believed_shares, pool_indices, scaled_belief


class Thompson(PromptSampler):
    """Draws ``v_i ~ N(V_i, sd_i^2)`` from the belief about each prompt, and takes the prompts nearest to `target`.

    Uncertain prompts are tried because their draws reach everywhere; prompts that are firmly believed to be far from
    the target are not, and a belief that has aged would never be corrected. So the share `explore` of each batch is
    drawn with equal chances from all prompts. The chances of a draw have no closed form, so `correct` is not possible.

    ``effective_prompts`` takes the chance of a prompt for that of a draw as near to the target as the farthest one that
    was taken.

    Args:
        target: value that a prompt should have, in [0, 1].
        explore: share of the batch that is drawn uniformly, in (0, 1]; rounded up.

    Raises:
        ValueError: a parameter out of its range.
    """

    known_chances = False

    def __init__(self, target: float = 0.4, explore: float = 0.1) -> None:
        if not 0 <= target <= 1 or not 0 < explore <= 1:
            raise ValueError(f"Thompson needs 0 <= target <= 1 and 0 < explore <= 1, got {target} and {explore}.")
        self.target = target
        self.explore = explore

    def draw(
        self, candidates: Sequence[str], belief: ValueBelief | None, size: int, generator: torch.Generator
    ) -> Draw:
        assert belief is not None
        part = pool_indices(len(candidates), size, generator)
        mean, variance = scaled_belief(belief, [candidates[i] for i in part.tolist()])
        drawn = mean + variance.sqrt() * torch.randn(mean.shape, generator=generator, dtype=torch.float64)
        distance = (drawn.clamp(0.0, 1.0) - self.target).abs()
        # Rounded up: at least one prompt of each batch is drawn uniformly.
        anyone = torch.randperm(len(part), generator=generator)[: -int(-self.explore * size // 1)]
        # Less than any distance, so they are always taken.
        distance[anyone] = -1.0
        rows = distance.argsort(stable=True)[:size]
        near = self._chances(mean, variance.sqrt(), max(0.0, float(distance[rows[-1]])))
        share = len(anyone) / len(part)
        effective = effective_number(share + (1 - share) * near)
        metrics = {**believed_shares(mean), "effective_prompts": effective / len(part)}
        # In a random order: on several ranks each one takes a part of the batch.
        return Draw(part[rows[torch.randperm(size, generator=generator)]], None, metrics)

    def _chances(self, mean: Tensor, deviation: Tensor, reach: float) -> Tensor:
        """``P(|v_i - target| <= reach)`` of draws that are clamped to [0, 1]. ``(P,)``."""
        low = self.target - reach
        high = self.target + reach
        # Draws are clamped, so an end of the range holds all that lies beyond it.
        ends = torch.tensor([-torch.inf if low <= 0 else low, torch.inf if high >= 1 else high], dtype=torch.float64)
        below, above = torch.special.ndtr((ends[:, None] - mean) / deviation.clamp(min=1e-9))
        return above - below
