"""DAPO's dynamic sampling: groups whose rewards are all equal are drawn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from basis_rl.registry import build
from basis_rl.samplers.base import Draw, PromptSampler, ValueBelief
from basis_rl.samplers.draws import DropSolved, Frontier, SpoWeights, Thompson, Uniform, Variance

# What draws the prompts whose groups may be drawn again.
DRAWING: dict[str, type[PromptSampler]] = {
    "uniform": Uniform,
    "variance": Variance,
    "frontier": Frontier,
    "spo": SpoWeights,
    "thompson": Thompson,
    "drop_solved": DropSolved,
}


class Dynamic(PromptSampler):
    """Groups whose rewards are all equal are replaced by other prompts' (DAPO, 2503.14476, Eq. 11).

    A batch is trained on when every group has two different rewards, or after `max_refills` further draws: then the
    groups that are left have no variance, as without it. Every rollout that was drawn is counted in ``num_rollouts``,
    and the belief learns from all of them. A group must have at least two rollouts.

    Departure: DAPO draws whole batches and keeps what is over for the next step; here only as many groups are drawn as
    are missing (on several ranks, on each as many as on the one that misses most).

    Args:
        max_refills: draws beyond the first one, >= 1.
        sampler: what draws, at first and again: a name, ``module:Class`` or an object; by default ``uniform``, as DAPO.
        sampler_kwargs: its parameters, where it is a name.

    Raises:
        ValueError: `max_refills` is not a whole number >= 1, or `sampler` cannot be built.
    """

    def __init__(
        self,
        max_refills: int = 4,
        sampler: str | PromptSampler | None = None,
        sampler_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        if not isinstance(max_refills, int) or isinstance(max_refills, bool) or max_refills < 1:
            raise ValueError(
                f"dynamic needs a whole number max_refills >= 1, got {max_refills}; without refills take 'uniform'."
            )
        self.max_refills = max_refills
        self.sampler = sampler
        self.sampler_kwargs = sampler_kwargs
        given = dict(sampler_kwargs or {})
        if isinstance(sampler, PromptSampler):
            self.drawing = sampler
        else:
            self.drawing = build("sampler", DRAWING, PromptSampler, sampler or "uniform", given)
        self.needs_belief = self.drawing.needs_belief
        # A run refuses `correct` here: the chances of a prompt that replaces another are not known.
        self.correct = self.drawing.correct

    def draw(
        self, candidates: Sequence[str], belief: ValueBelief | None, size: int, generator: torch.Generator
    ) -> Draw:
        return self.drawing.draw(candidates, belief, size, generator)

    def keeps(self, rewards: Tensor) -> Tensor:
        scored = ~rewards.isnan()
        # A group without a reward has least above largest, so it is not kept.
        least = torch.where(scored, rewards, torch.inf).amin(dim=1)
        largest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
        return largest > least

    def state_dict(self) -> dict[str, Any]:
        return self.drawing.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawing.load_state_dict(state)
