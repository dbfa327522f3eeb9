"""The bottom line of a comparison in words: who is ahead, by how much, after how many rollouts, and how certainly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from basis_rl.report.compare import (
    Comparison,
    Estimate,
    difference,
    evaluation_name,
    evaluations,
    last_until,
    over_seeds,
    rollouts_to,
)
from basis_rl.report.runs import Group, Run
from basis_rl.report.tables import (
    THREE,
    final_reward,
    interval,
    reference_reward,
    signed,
    table_price,
    table_uses,
    with_spread,
)

_REWARD = "a final training reward of"


@dataclass(frozen=True)
class _Place:
    """A group and the value that each of its runs reached."""

    group: Group
    values: list[float]

    @property
    def found(self) -> Estimate:
        return over_seeds(self.values)

    def above(self, other: _Place) -> Estimate:
        return difference(self.group, self.values, other.group, other.values)

    def __str__(self) -> str:
        return with_spread(self.found, THREE)


def verdict(comparison: Comparison) -> list[str]:
    """One to four sentences; the first one is the answer.

    The measure is the mean over those evaluation sets on which all groups were evaluated. If there is none, it is the
    training reward over the last tenth of the budget. The group with the highest mean is compared with each of the
    others by the interval of `difference`: it is ahead of a group if the interval lies above 0.
    """
    measure, value = _measure(comparison)
    places = [_Place(group, [value(run) for run in group.runs]) for group in comparison.groups]
    places = sorted((place for place in places if place.found.n), key=lambda place: -place.found.mean)
    after = f"after {comparison.budget:,.0f} rollouts"
    if not places:
        return ["No run has logged a reward, so there is nothing to compare."]
    best = places[0]
    if len(places) == 1:
        return [f"'{best.group.label}' has {measure} {best} {after}; there is nothing to compare it with."]
    said = [_first(best, places[1], measure, after)]
    if len(places) > 2:
        said.append(_others(best, places[2:]))
    if measure == _REWARD and len({group.settings.get("prompt_sampler") for group in comparison.groups}) > 1:
        said.append(
            "The settings draw their prompts differently, so their training rewards come from different prompts. Only "
            "an evaluation (eval_strategy: steps) can compare them."
        )
    elif saved := _saved(best.group, comparison):
        said.append(saved)
    return said


def _measure(comparison: Comparison) -> tuple[str, Callable[[Run], float]]:
    """The measure that ranks the groups: its name, in words that a number can follow, and its value for a run."""
    measures = {key: partial(last_until, key=key, budget=comparison.budget) for key in evaluations(comparison.groups)}
    common = {
        key: value
        for key, value in measures.items()
        if all(over_seeds([value(run) for run in group.runs]).n for group in comparison.groups)
    }
    if not common:
        return _REWARD, final_reward(comparison.budget)
    what = f"a mean over {len(common)} evaluations of"
    if len(common) == 1:
        name = evaluation_name(next(iter(common)))
        what = f"an evaluation ({name}) of" if name else "an evaluation reward of"
    return what, lambda run: fmean(value(run) for value in common.values())


def _first(best: _Place, second: _Place, measure: str, after: str) -> str:
    found = best.above(second)
    if found.spread is None:
        return (
            f"'{best.group.label}' ends highest, with {measure} {best} {after}, {THREE(found.mean)} above "
            f"'{second.group.label}' ({second}). At least one of the two has a single seed, so the difference may be "
            "chance. Run more seeds to find out (basis-rl sweep --seeds 0,1,2)."
        )
    bounds = interval(found, THREE)
    if found.excludes_zero:
        return (
            f"'{best.group.label}' is ahead: it has {measure} {best} {after}, {THREE(found.mean)}{bounds} (95 % "
            f"interval over {found.n} seeds) above the next, '{second.group.label}' ({second})."
        )
    return (
        f"The seeds do not show whether '{best.group.label}' or '{second.group.label}' is ahead: they have {measure} "
        f"{best} and {second} {after}; the difference is {THREE(found.mean)}{bounds} (95 % interval over {found.n} "
        "seeds)."
    )


def _others(best: _Place, places: list[_Place]) -> str:
    """How the best group compares with the third and later ones."""
    sure: list[str] = []
    unsure: list[str] = []
    for place in places:
        found = best.above(place)
        text = f"'{place.group.label}' ({signed(found.mean, THREE)}{interval(found, THREE)})"
        (sure if found.excludes_zero else unsure).append(text)
    parts = [f"is ahead of {_listed(sure)}"] if sure else []
    parts += [f"is not certain to be ahead of {_listed(unsure)}"] if unsure else []
    return f"'{best.group.label}' {' and '.join(parts)}."


def _saved(best: Group, comparison: Comparison) -> str:
    """After how many rollouts the best group reaches the reference's final reward; empty if not all its runs do."""
    target = reference_reward(comparison)
    reached = [rollouts_to(run, target, comparison.budget) for run in best.runs]
    if best is comparison.reference or any(map(math.isnan, reached)):
        return ""
    whole, _ = table_price(best, table_uses(comparison))
    table = f"; its value table took another {whole:,.0f} rollouts, once" if whole else ""
    return (
        f"'{best.label}' reaches the final training reward of '{comparison.reference.label}' after "
        f"{fmean(reached):,.0f} of the {comparison.budget:,.0f} rollouts{table}."
    )


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
