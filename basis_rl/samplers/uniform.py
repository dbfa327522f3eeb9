"""Every prompt alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from basis_rl.samplers.base import Draw, PromptSampler, ValueBelief


class Uniform(PromptSampler):
    """All prompts once per epoch, shuffled: TRL's order. Asked for a draw, it draws all prompts with equal chances."""

    needs_belief = False
    in_dataset_order = True

    def draw(
        self, candidates: Sequence[str], belief: ValueBelief | None, size: int, generator: torch.Generator
    ) -> Draw:
        rows = torch.randperm(len(candidates), generator=generator)[:size]
        return Draw(rows, torch.ones(size, dtype=torch.float64), {})
