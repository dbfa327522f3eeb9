"""The contracts: a belief about the value of each prompt, and a sampler that draws prompts by it.

Every rank has the same belief, draws with the same generator and runs the same deterministic code, so a sampler holds
no collective and does not depend on the world size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from basis_rl.registry import Configured

# Prompts whose belief is looked at for one batch; of a larger dataset a uniform part, another one for each batch. It
# bounds the cost of a draw whatever the dataset's size, and a batch is far smaller.
POOL = 1 << 13


@runtime_checkable
class ValueBelief(Protocol):
    """What is believed about the value of prompts: the expected reward of the policy's rollouts of each.

    `basis`, `basis_history`, `bv_blend` and `spo` are beliefs themselves. A belief's `Baseline.update` is also given
    the groups that a sampler has discarded (`dynamic`), after the batch that they were drawn for: rewards, groups and
    prompts (with texts where it requires them), no tokens and no other signals.
    """

    @property
    def reward_range(self) -> tuple[float, float]:
        """``(low, high)``, the least and the largest reward."""

    def believed(self, prompt_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Mean and variance of the value of each prompt, in reward units, from the batches before. ``(P,), (P,)``.

        Both are float64; prompts that were never seen have a prior. Must not change the state.
        """


def scaled_belief(belief: ValueBelief, prompt_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
    """`ValueBelief.believed` on the scale where ``reward_range`` is (0, 1): means in [0, 1], variances >= 0."""
    low, high = belief.reward_range
    mean, variance = belief.believed(prompt_ids)
    for name, values in (("mean", mean), ("variance", variance)):
        if tuple(values.shape) != (len(prompt_ids),) or not bool(values.isfinite().all()):
            needs = f"must return one finite {name} for each of {len(prompt_ids)} prompts"
            raise ValueError(f"`{type(belief).__name__}.believed` {needs}, and returned {shown(values)}.")
    return ((mean - low) / (high - low)).clamp(0.0, 1.0), (variance / (high - low) ** 2).clamp(min=0.0)


def shown(value: Any) -> str:
    """In words, for messages, what was returned instead of a tensor of the right form."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    infinite = " that is not finite" if not bool(value.isfinite().all()) else ""
    return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}{infinite}"


def believed_shares(mean: Tensor) -> dict[str, float]:
    """Shares of the prompts that are believed to be solved and impossible, by their scaled believed values ``(P,)``."""
    return {
        "believed_solved": float((mean > 0.95).double().mean()),
        "believed_impossible": float((mean < 0.05).double().mean()),
    }


@dataclass(frozen=True)
class Draw:
    """The prompts of one generation batch.

    Attributes:
        rows: ``(n,)`` int64, different indices into the candidates.
        ratio: ``(n,)`` float64, the chance of each under a uniform draw over its chance under this one,
            ``(n / P) / pi_i``; None where the chances are not known.
        metrics: scalars that describe the draw.
        counts: ``(n,)`` int64, the rollouts of each; None where all have ``num_generations``. The trainer sets it.
    """

    rows: Tensor
    ratio: Tensor | None
    metrics: dict[str, float]
    counts: Tensor | None = None

    @staticmethod
    def checked(draw: Any, candidates: int, size: int, *, correct: bool) -> Draw:
        """What a sampler has returned, if it is `size` different prompts, with the ratio that `correct` needs.

        Raises:
            ValueError: it is not; the message says what it is.
        """
        if not isinstance(draw, Draw):
            raise ValueError(f"`draw` must return a Draw, and returned a {type(draw).__name__}.")
        rows = draw.rows
        ratio = draw.ratio
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or tuple(rows.shape) != (size,):
            raise ValueError(f"`draw` must return {size} rows as an int64 tensor, and returned {shown(rows)}.")
        # A prompt that is drawn twice would be two groups, and count twice.
        if len(rows.unique()) != size or int(rows.min()) < 0 or int(rows.max()) >= candidates:
            raise ValueError(f"`draw` did not draw {size} different prompts out of {candidates}.")
        fits = isinstance(ratio, Tensor) and ratio.shape == rows.shape and bool((ratio.isfinite() & (ratio > 0)).all())
        if correct and not fits:
            needs = f"a ratio for each of {size} prompts, finite and > 0"
            raise ValueError(f"`correct` needs {needs}, and `draw` returned {shown(ratio)}.")
        try:
            return Draw(rows, ratio, {name: float(value) for name, value in draw.metrics.items()})
        except (AttributeError, TypeError, ValueError):
            raise ValueError("`draw` must return its metrics as a dictionary of numbers.") from None


class PromptSampler(Configured, ABC):
    """Draws the prompts of each generation batch. It has no state: what is learnt is in the belief.

    Class attributes:
        needs_belief: whether `draw` reads a belief. An object's own may depend on its parameters.
        in_dataset_order: leaves the order to the trainer: each epoch all prompts once, shuffled, as in TRL.
        known_chances: whether draws have a `Draw.ratio`, so that `correct` is possible.
        max_refills: how often groups that `keeps` refuses are drawn again before a batch is trained on.
        correct: weigh advantages by the ratio to a uniform draw, which undoes the change of the objective. An
            object's own.
        clip: ``(least, largest)`` ratio that `correct` uses: a prompt that is rarely drawn would otherwise have a
            large weight when it is drawn.
    """

    needs_belief: bool = True
    in_dataset_order: ClassVar[bool] = False
    known_chances: ClassVar[bool] = True
    max_refills: int = 0
    correct: bool = False
    clip: tuple[float, float] = (0.1, 10.0)

    @abstractmethod
    def draw(self, candidates: Sequence[str], belief: ValueBelief | None, size: int, generator: Generator) -> Draw:
        """`size` different prompts. The same for equal arguments and states of the generator.

        Args:
            candidates: P prompt ids, P >= size.
            belief: None only where `needs_belief` is False.
            size: n >= 1.
            generator: of all random numbers that are used, on the CPU.

        Raises:
            ValueError: no such draw is possible; the message says why.
        """

    def keeps(self, rewards: Tensor) -> Tensor:
        """``(M, G) -> (M,)`` bool: the groups worth training on; others are drawn again, `max_refills` times."""
        return torch.ones(rewards.shape[0], dtype=torch.bool)


def pool_indices(count: int, size: int, generator: Generator) -> Tensor:
    """Indices of the candidates whose belief is looked at: all, or a uniform part. ``(min(P, POOL),)``, ascending."""
    if count <= max(POOL, size):
        return torch.arange(count)
    return subset(count, max(POOL, size), generator)


def pool(
    candidates: Sequence[str], belief: ValueBelief, size: int, generator: Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`pool_indices` of the candidates, and `scaled_belief` about these prompts."""
    part = pool_indices(len(candidates), size, generator)
    return part, *scaled_belief(belief, [candidates[i] for i in part.tolist()])


def subset(count: int, wanted: int, generator: Generator) -> Tensor:
    """`wanted` of the numbers below `count`, every such set with the same probability. ``(wanted,)``, ascending."""
    # As uniform as the permutation, without a number for each of a million prompts.
    if count >= 4 * wanted:
        # A quarter more than wanted, since some numbers come twice.
        found = torch.randint(count, (5 * wanted // 4 + 8,), generator=generator).unique()
        if len(found) >= wanted:
            return found[torch.randperm(len(found), generator=generator)[:wanted]].sort().values
    return torch.randperm(count, generator=generator)[:wanted].sort().values
