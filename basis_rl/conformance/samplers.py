"""`check_sampler`: one conformance matrix, run over every registered sampler and over yours.

It gives a sampler beliefs that a run will give it sooner or later (nothing known, everything solved, everything
impossible, reward ranges other than 0 to 1) and says which promises of `basis_rl.samplers.base.PromptSampler` it
breaks.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from basis_rl.samplers.base import Draw, PromptSampler

_SIZE = 4
_IDS = [f"prompt-{i}" for i in range(16)]
_DRAWS = 1500


class SamplerError(AssertionError):
    """A sampler breaks its contract; the message says which promises, and what was seen."""


class ExampleBelief:
    """A belief with given means and variances on the scale from 0 to 1, in reward units of `reward_range`."""

    def __init__(self, mean: Tensor, variance: Tensor, reward_range: tuple[float, float] = (0.0, 1.0)) -> None:
        self.reward_range = reward_range
        low, high = reward_range
        self.mean = {name: low + (high - low) * float(m) for name, m in zip(_IDS, mean, strict=True)}
        self.variance = {name: (high - low) ** 2 * float(v) for name, v in zip(_IDS, variance, strict=True)}

    def believed(self, prompt_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See `ValueBelief.believed`."""
        means, variances = ([of[name] for name in prompt_ids] for of in (self.mean, self.variance))
        return torch.tensor(means, dtype=torch.float64), torch.tensor(variances, dtype=torch.float64)


def example_beliefs() -> dict[str, ExampleBelief]:
    """Beliefs by what is special about them."""
    mixed, p = torch.linspace(0, 1, len(_IDS), dtype=torch.float64), len(_IDS)
    spread = 0.2 * mixed * (1 - mixed)
    return {
        "mixed": ExampleBelief(mixed, spread),
        "nothing known": ExampleBelief(torch.full((p,), 0.5), torch.full((p,), 0.08)),
        "all solved": ExampleBelief(torch.ones(p), torch.zeros(p)),
        "all impossible": ExampleBelief(torch.zeros(p), torch.zeros(p)),
        "rewards from -1 to 3": ExampleBelief(mixed, spread, (-1.0, 3.0)),
    }


def check_sampler(make: Callable[[], PromptSampler]) -> list[str]:
    """Run the conformance matrix on the sampler that `make` builds.

    Args:
        make: builds a fresh object each time it is called.

    Returns:
        The names of the checks that were run and passed.

    Raises:
        SamplerError: with every promise that is broken.
    """
    broken: list[str] = []
    for check in _CHECKS:
        try:
            check(make)
        except SamplerError as error:
            broken.append(str(error))
        except Exception as error:
            broken.append(f"raises {type(error).__name__}: {error}")
    if broken:
        name = getattr(make, "__name__", type(make).__name__)
        raise SamplerError(f"{name} " + f"\n{name} ".join(dict.fromkeys(broken)))
    return [check.__name__.removeprefix("_check_") for check in _CHECKS]


def _draw(sampler: PromptSampler, belief: Any, size: int = _SIZE, seed: int = 0) -> Draw:
    return sampler.draw(_IDS, belief if sampler.needs_belief else None, size, torch.Generator().manual_seed(seed))


def _check_rows(make: Callable[[], PromptSampler]) -> None:
    for name, belief in example_beliefs().items():
        for size in (1, _SIZE, len(_IDS)):
            _checked(make(), belief, size, name)


def _checked(sampler: PromptSampler, belief: Any, size: int, name: str, *, correct: bool = False) -> None:
    """A run finds nothing wrong with a draw."""
    draw = _draw(sampler, belief, size)
    try:
        Draw.checked(draw, len(_IDS), size, correct=correct)
    except ValueError as error:
        raise SamplerError(f"breaks a promise ({name}): {error}") from error


def _check_determinism(make: Callable[[], PromptSampler]) -> None:
    belief = example_beliefs()["mixed"]
    torch.manual_seed(0)
    first = _draw(make(), belief)
    torch.manual_seed(1)
    again, others = _draw(make(), belief), [_draw(make(), belief, seed=seed).rows.tolist() for seed in range(1, 9)]
    if not torch.equal(first.rows, again.rows):
        raise SamplerError("draws from other random numbers than the generator's: ranks would train on other prompts")
    if all(rows == first.rows.tolist() for rows in others):
        raise SamplerError("does not use the generator: every batch has the same prompts")


def _check_no_side_effect(make: Callable[[], PromptSampler]) -> None:
    for belief in example_beliefs().values():
        kept, sampler = copy.deepcopy(vars(belief)), make()
        first = _draw(sampler, belief).rows
        if vars(belief) != kept:
            raise SamplerError("writes into the belief")
        if not torch.equal(first, _draw(sampler, belief).rows):
            raise SamplerError("changes its state in `draw`: a batch that is drawn again would have other prompts")


def _check_every_prompt(make: Callable[[], PromptSampler]) -> None:
    """Frequencies over many draws: no prompt is left out, and the reported chances are the true ones."""
    sampler = make()
    for name in ("mixed", "all solved"):
        count, weight = torch.zeros(len(_IDS)), torch.zeros(len(_IDS), dtype=torch.float64)
        belief = example_beliefs()[name]
        for seed in range(_DRAWS):
            draw = _draw(sampler, belief, seed=seed)
            count[draw.rows] += 1
            if draw.ratio is not None:
                weight[draw.rows] += draw.ratio
        if bool((count == 0).any()):
            raise SamplerError(
                f"never draws {int((count == 0).sum())} of {len(_IDS)} prompts in {_DRAWS} draws of {_SIZE} ({name}): "
                "a belief that is wrong could not be corrected"
            )
        if sampler.known_chances:
            expected = weight / _DRAWS / (_SIZE / len(_IDS))  # E[1_i ratio_i] is the uniform chance
            noise = 6 * (1.0 / count.clamp(min=1)).sqrt()
            if bool(((expected - 1).abs() > noise).any()):
                raise SamplerError(f"returns ratios that do not fit the frequencies of its draws ({name})")


def _check_ratio(make: Callable[[], PromptSampler]) -> None:
    sampler = make()
    for name, belief in example_beliefs().items():
        ratio = _draw(sampler, belief).ratio
        if (ratio is not None) != sampler.known_chances:
            raise SamplerError("must return a ratio exactly where it says known_chances = True")
        if ratio is not None:
            _checked(sampler, belief, _SIZE, name, correct=True)
    if sampler.correct and not sampler.known_chances:
        raise SamplerError("says correct = True, but does not know the chances of its draws")
    if sampler.correct and sampler.max_refills:
        raise SamplerError("says correct = True and max_refills > 0: the chances of a refill are not known")


def _check_keeps(make: Callable[[], PromptSampler]) -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [torch.nan, torch.nan, torch.nan]])
    kept = make().keeps(rewards)
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool or tuple(kept.shape) != (3,):
        raise SamplerError("must return one bool per group from `keeps`")
    if not bool(kept[0]):
        raise SamplerError("refuses a group with different rewards in `keeps`: a batch could never be filled")


def _check_state_round_trip(make: Callable[[], PromptSampler]) -> None:
    belief, sampler = example_beliefs()["mixed"], make()
    buffer = io.BytesIO()
    torch.save(sampler.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    restored = make()
    restored.load_state_dict(state)
    if not torch.equal(_draw(sampler, belief).rows, _draw(restored, belief).rows):
        raise SamplerError("is not restored exactly by state_dict and load_state_dict")
    try:
        make().load_state_dict({**state, "not_a_key": 1})
    except ValueError:
        return
    raise SamplerError("loads a state with an unknown key without a ValueError")


_CHECKS = (
    _check_rows,
    _check_determinism,
    _check_no_side_effect,
    _check_every_prompt,
    _check_ratio,
    _check_keeps,
    _check_state_round_trip,
)
