"""Every prompt alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from basis_rl.samplers.base import (
    Draw,
    PromptSampler,
    ValueBelief,
    believed_shares,
    pool_indices,
    scaled_belief,
    subset,
)


class Uniform(PromptSampler):
    """All prompts once per epoch, shuffled: TRL's order. Asked for a draw, it draws all prompts with equal chances."""

    needs_belief = False
    in_dataset_order = True

    def draw(
        self, candidates: Sequence[str], belief: ValueBelief | None, size: int, generator: torch.Generator
    ) -> Draw:
        # `subset` is ascending: without a shuffle, ranks would get neighbours in the dataset.
        rows = subset(len(candidates), size, generator)[torch.randperm(size, generator=generator)]
        metrics = {"effective_prompts": 1.0}
        if belief is not None:
            part = pool_indices(len(candidates), size, generator)
            metrics |= believed_shares(scaled_belief(belief, [candidates[i] for i in part.tolist()])[0])
        return Draw(rows, torch.ones(size, dtype=torch.float64), metrics)
