"""`check_sampler`: one conformance matrix, run over every registered sampler and over yours.

It gives a sampler beliefs that a run will give it sooner or later (nothing known, everything solved, everything
impossible, reward ranges other than 0 to 1) and says which promises of `basis_rl.samplers.base.PromptSampler` it
breaks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from basis_rl.conformance.promises import PromiseError, builder, check_promises, refusal, require
from basis_rl.samplers.base import Draw, PromptSampler

_SIZE = 4
_IDS = [f"prompt-{i}" for i in range(16)]
_DRAWS = 1500


class SamplerError(PromiseError):
    """A sampler breaks its contract; the message says which promises, and what was seen."""

    kind = "prompt sampler"


class ExampleBelief:
    """A belief with given means and variances on the scale from 0 to 1, in reward units of `reward_range`."""

    def __init__(self, mean: Tensor, variance: Tensor, reward_range: tuple[float, float] = (0.0, 1.0)) -> None:
        low, high = self.reward_range = reward_range
        self.values = torch.stack([low + (high - low) * mean, (high - low) ** 2 * variance]).double()

    def believed(self, prompt_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See `ValueBelief.believed`."""
        mean, variance = self.values[:, [_IDS.index(name) for name in prompt_ids]]
        return mean, variance


def example_beliefs() -> dict[str, ExampleBelief]:
    """Beliefs by what is special about them."""
    mixed = torch.linspace(0, 1, len(_IDS), dtype=torch.float64)
    p = len(_IDS)
    spread = 0.2 * mixed * (1 - mixed)
    return {
        "mixed": ExampleBelief(mixed, spread),
        "nothing known": ExampleBelief(torch.full((p,), 0.5), torch.full((p,), 0.08)),
        "all solved": ExampleBelief(torch.ones(p), torch.zeros(p)),
        "all impossible": ExampleBelief(torch.zeros(p), torch.zeros(p)),
        "rewards from -1 to 3": ExampleBelief(mixed, spread, (-1.0, 3.0)),
    }


def check_sampler(make: Any) -> list[str]:
    """Run the conformance matrix on the sampler that `make` builds.

    Args:
        make: builds a fresh object each time it is called, or an object, which is copied.

    Returns:
        The names of the checks that were run and passed.

    Raises:
        SamplerError: with every promise that is broken.
    """
    build = builder(make, PromptSampler, SamplerError)
    cases = {"": functools.partial(_Promises, build)}
    return check_promises(SamplerError, type(build()).__name__, _Promises, cases)


def _draw(sampler: PromptSampler, belief: Any, size: int = _SIZE, seed: int = 0) -> Draw:
    return sampler.draw(_IDS, belief if sampler.needs_belief else None, size, torch.Generator().manual_seed(seed))


class _Promises:
    """A method for each promise of the contract."""

    def __init__(self, make: Callable[[], PromptSampler]) -> None:
        self.make = make
        self.sampler = make()
        self.beliefs = example_beliefs()

    def rows(self) -> None:
        """A run finds nothing wrong with a draw."""
        correct = self.sampler.known_chances
        for name, belief in self.beliefs.items():
            for size in (1, _SIZE, len(_IDS)):
                wrong = refusal(Draw.checked, _draw(self.make(), belief, size), len(_IDS), size, correct=correct)
                require(not wrong, f"{wrong} ({name})")

    def determinism(self) -> None:
        drawn: list[list[int]] = []
        for seed in (0, *range(9)):
            torch.manual_seed(len(drawn))
            drawn.append(_draw(self.make(), self.beliefs["mixed"], seed=seed).rows.tolist())
        first, again, *others = drawn
        message = "draws from other random numbers than the generator's: ranks would train on other prompts"
        require(again == first, message)
        require(any(rows != first for rows in others), "does not use the generator: every batch has the same prompts")

    def no_side_effect(self) -> None:
        for belief in self.beliefs.values():
            kept = copy.deepcopy(belief.values)
            sampler = self.make()
            first = _draw(sampler, belief).rows
            require(torch.equal(belief.values, kept), "writes into the belief")
            same = torch.equal(first, _draw(sampler, belief).rows)
            require(same, "changes its state in `draw`: a batch that is drawn again would have other prompts")

    def every_prompt(self) -> None:
        """Frequencies over many draws: no prompt is left out, and the reported chances are the true ones."""
        for name in ("mixed", "all solved"):
            count = torch.zeros(len(_IDS))
            weight = torch.zeros(len(_IDS), dtype=torch.float64)
            for seed in range(_DRAWS):
                draw = _draw(self.sampler, self.beliefs[name], seed=seed)
                count[draw.rows] += 1
                weight[draw.rows] += 0.0 if draw.ratio is None else draw.ratio
            never = f"never draws {int((count == 0).sum())} of {len(_IDS)} prompts in {_DRAWS} draws ({name})"
            require((count > 0).all(), f"{never}: a belief that is wrong could not be corrected")
            # E[1_i ratio_i] is the uniform chance.
            expected = weight / _DRAWS / (_SIZE / len(_IDS))
            true = ((expected - 1).abs() <= 6 / count.sqrt()).all()
            message = f"returns ratios that do not fit the frequencies of its draws ({name})"
            require(not self.sampler.known_chances or true, message)

    def ratio(self) -> None:
        known = self.sampler.known_chances
        correct = self.sampler.correct
        given = [_draw(self.sampler, belief).ratio is not None for belief in self.beliefs.values()]
        require(set(given) == {known}, "must return a ratio exactly where it says known_chances = True")
        require(known or not correct, "says correct = True, but does not know the chances of its draws")
        refills = correct and self.sampler.max_refills > 0
        require(not refills, "says correct = True and max_refills > 0: the chances of a refill are not known")

    def keeps(self) -> None:
        rewards = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [torch.nan, torch.nan, torch.nan]])
        kept: Any = self.sampler.keeps(rewards)
        fits = isinstance(kept, Tensor) and kept.dtype == torch.bool and tuple(kept.shape) == (3,)
        require(fits, "must return one bool per group from `keeps`")
        require(kept[0], "refuses a group with different rewards in `keeps`: a batch could never be filled")
