"""The registered samplers: uniform, by weights of the believed value, by a random draw from the belief; and DAPO's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Generator, Tensor

from basis_rl.functional.selection import effective_number, inclusion_probabilities, systematic_sample
from basis_rl.registry import Bounds, NotNegative, OneOrMore, Positive, PositiveShare, Share, build
from basis_rl.samplers.base import Draw, PromptSampler, ValueBelief, believed_shares, pool, shown, subset

Inside = Annotated[float, Bounds("between 0 and 1", lambda x: 0 < x < 1)]


class Uniform(PromptSampler):
    """All prompts once per epoch, shuffled: TRL's order. Asked for a draw, it draws all prompts with equal chances."""

    needs_belief = False
    in_dataset_order = True

    def draw(self, candidates: Sequence[str], belief: ValueBelief | None, size: int, generator: Generator) -> Draw:
        # `subset` is ascending: without a shuffle, ranks would get neighbours in the dataset.
        rows = subset(len(candidates), size, generator)[torch.randperm(size, generator=generator)]
        metrics = {"effective_prompts": 1.0}
        if belief is not None:
            metrics |= believed_shares(pool(candidates, belief, size, generator)[1])
        return Draw(rows, torch.ones(size, dtype=torch.float64), metrics)


class WeightedSampler(PromptSampler):
    """Draws prompts with chances ``pi_i = min(1, c w_i)``, n of them in the mean of every batch exactly n.

    Subclasses give the weights. Of more than 8,192 candidates, each batch looks at a uniform part, and the chances are
    those of both draws together.
    """

    @abstractmethod
    def weights(self, mean: Tensor, variance: Tensor) -> Tensor:
        """``(P,)`` weights >= 0, at least n of them > 0.

        Args:
            mean: ``(P,)`` believed values on the scale from 0 to 1.
            variance: ``(P,)`` of these beliefs.
        """

    def draw(self, candidates: Sequence[str], belief: ValueBelief | None, size: int, generator: Generator) -> Draw:
        assert belief is not None
        part, mean, variance = pool(candidates, belief, size, generator)
        weights = self.weights(mean, variance)
        if not isinstance(weights, Tensor) or weights.shape != mean.shape:
            raise ValueError(f"`weights` must return a tensor of shape ({len(part)},), and returned {shown(weights)}.")
        try:
            chances = inclusion_probabilities(weights, size)
        except ValueError as error:
            if len(part) == len(candidates):
                raise
            looked = f"Each batch considers {len(part):,} of {len(candidates):,} prompts, drawn uniformly"
            raise ValueError(f"{error} ({looked}: these are meant.)") from error
        drawn = systematic_sample(chances, generator)
        metrics = {**believed_shares(mean), "effective_prompts": effective_number(chances) / len(part)}
        return Draw(part[drawn], size / len(part) / chances[drawn], metrics)


@dataclass(eq=False, kw_only=True)
class _ByValue(WeightedSampler):
    """``w_i = f(V_i) + floor + bonus * sd_i``, sd being the standard deviation of the belief about V.

    Args:
        floor: > 0: every prompt keeps a positive chance, and a belief that is wrong or has aged is noticed.
        bonus: >= 0, what uncertainty is worth: prompts that were hardly seen are drawn more often.
        correct: weigh advantages by ``(n / P) / pi_i``: the uniform objective again, with more variance.
        clip: bounds of that ratio.

    Raises:
        ValueError: a parameter out of its range.
    """

    floor: Positive = 0.01
    bonus: NotNegative = 0.0
    correct: bool = False
    clip: tuple[float, float] = (0.1, 10.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        least, largest = self.clip
        if not 0 <= least <= 1 <= largest:
            raise ValueError(f"clip must be (least, largest) with 0 <= least <= 1 <= largest, got {self.clip}.")
        # In a recipe it is a list.
        self.clip = (float(least), float(largest))

    @abstractmethod
    def of_value(self, mean: Tensor) -> Tensor:
        """``f(V)``, ``(P,) -> (P,)``."""

    def weights(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self.of_value(mean) + self.floor + self.bonus * variance.sqrt()


class Variance(_ByValue):
    """``w_i = V_i (1 - V_i) + floor``: the variance of a 0/1 reward, and so the expected size of an advantage.

    Solved and impossible prompts have only the floor: at 0.01 a twenty-sixth of a prompt at V = 0.5.
    """

    def of_value(self, mean: Tensor) -> Tensor:
        return mean * (1.0 - mean)


@dataclass(eq=False, kw_only=True)
class Frontier(_ByValue):
    """``w_i = (1 - V_i)^hard V_i^easy + floor``: what can be learnt but is not yet, most at V = easy / (hard + easy).

    With the default exponents, 1 and 1/2, that is V = 1/3: against `variance` rarely solved prompts come first.
    """

    floor: Positive = 0.02
    hard: NotNegative = 1.0
    # At 0 impossible prompts would have the largest weights.
    easy: Positive = 0.5

    def of_value(self, mean: Tensor) -> Tensor:
        return (1.0 - mean) ** self.hard * mean**self.easy


@dataclass(eq=False, kw_only=True)
class SpoWeights(_ByValue):
    """``w_i = sqrt(V_i (1 - V_i)) + 0.05``, the weights of SPO (Xu and Ding 2025, arXiv 2509.13232)."""

    floor: Positive = 0.05

    def of_value(self, mean: Tensor) -> Tensor:
        return (mean * (1.0 - mean)).sqrt()


@dataclass(eq=False, kw_only=True)
class DropSolved(_ByValue):
    """``w_i = 1`` where ``V_i <= solved``, else `floor`: every prompt alike that is not believed to be solved.

    Impossible prompts keep their share: use it where there are none.
    """

    floor: PositiveShare = 0.02
    bonus: NotNegative = field(default=0.0, init=False)
    solved: Inside = 0.9

    def of_value(self, mean: Tensor) -> Tensor:
        return (1.0 - self.floor) * (mean <= self.solved).to(mean.dtype)


@dataclass(eq=False)
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

    target: Share = 0.4
    explore: PositiveShare = 0.1
    known_chances = False

    def draw(self, candidates: Sequence[str], belief: ValueBelief | None, size: int, generator: Generator) -> Draw:
        assert belief is not None
        part, mean, variance = pool(candidates, belief, size, generator)
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


# What draws the prompts whose groups may be drawn again.
DRAWING: dict[str, type[PromptSampler]] = {
    "uniform": Uniform,
    "variance": Variance,
    "frontier": Frontier,
    "spo": SpoWeights,
    "thompson": Thompson,
    "drop_solved": DropSolved,
}


@dataclass(eq=False)
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

    max_refills: OneOrMore = 4
    sampler: str | PromptSampler | None = None
    sampler_kwargs: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        drawing: Any = self.sampler or "uniform"
        if isinstance(drawing, str):
            drawing = build("sampler", DRAWING, PromptSampler, drawing, dict(self.sampler_kwargs or {}))
        self.drawing: PromptSampler = drawing
        self.needs_belief = self.drawing.needs_belief
        # A run refuses `correct` here: the chances of a prompt that replaces another are not known.
        self.correct = self.drawing.correct

    def draw(self, candidates: Sequence[str], belief: ValueBelief | None, size: int, generator: Generator) -> Draw:
        return self.drawing.draw(candidates, belief, size, generator)

    def keeps(self, rewards: Tensor) -> Tensor:
        scored = ~rewards.isnan()
        # A group without a reward has least above largest, so it is not kept.
        least = torch.where(scored, rewards, torch.inf).amin(dim=1)
        largest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
        return largest > least
