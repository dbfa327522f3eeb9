"""The bottom line of a comparison in words: who is ahead, by how much, after how many rollouts, how surely."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from basis_rl.report.compare import (
    END,
    Comparison,
    Estimate,
    difference,
    evaluation_name,
    evaluations,
    last_until,
    mean_until,
    over_seeds,
    rollouts_to,
)
from basis_rl.report.runs import Group, Run
from basis_rl.report.tables import signed, table_price, table_uses

_THREE = "{:.3f}".format


@dataclass(frozen=True)
class _Place:
    """A group with what it reached, in the order of that."""

    group: Group
    values: list[float]

    @property
    def mean(self) -> float:
        return over_seeds(self.values).mean


def verdict(comparison: Comparison) -> list[str]:
    """One to four sentences; the first one is the answer.

    The measure is what the runs were evaluated on, if all groups were: the mean of its sets. Else it is the training
    reward over the last tenth of the budget. The group with the highest mean is compared with each of the others by
    the interval of `difference`: it is ahead of those whose interval lies above 0.
    """
    measure, value = _measure(comparison)
    places = [_Place(group, [value(run) for run in group.runs]) for group in comparison.groups]
    places = sorted((place for place in places if not math.isnan(place.mean)), key=lambda place: -place.mean)
    after = f"after {comparison.budget:,.0f} rollouts"
    if not places:
        return ["No run has logged a reward: there is nothing to compare."]
    if len(places) == 1:
        only = places[0]
        return [f"'{only.group.label}' has {measure} {_spread(only)} {after}; there is nothing to compare it with."]
    said = [_first(places, measure, after)]
    if len(places) > 2:
        said.append(_others(places))
    if measure == _REWARD and len({group.settings.get("prompt_sampler") for group in comparison.groups}) > 1:
        said.append(
            "The settings draw their prompts differently, so that their training rewards are of different prompts: "
            "only an evaluation (eval_strategy: steps) compares them."
        )
    elif saved := _saved(places[0].group, comparison):
        said.append(saved)
    return said


_REWARD = "a final training reward of"


def _measure(comparison: Comparison) -> tuple[str, Callable[[Run], float]]:
    """What groups are ranked by, in words that a number can follow, and its value for a run."""
    budget = comparison.budget
    common = [
        key
        for key in evaluations(comparison.groups)
        if all(any(not math.isnan(last_until(run, key, budget)) for run in group.runs) for group in comparison.groups)
    ]
    if not common:
        return _REWARD, lambda run: mean_until(run, "reward", budget, END)
    what = f"a mean over {len(common)} evaluations of"
    if len(common) == 1:
        name = evaluation_name(common[0])
        what = f"an evaluation ({name}) of" if name else "an evaluation reward of"
    return what, lambda run: fmean(last_until(run, key, budget) for key in common)


def _first(places: list[_Place], measure: str, after: str) -> str:
    best, second = places[:2]
    found = _between(best, second)
    if found.spread is None:
        return (
            f"'{best.group.label}' ends highest, with {measure} {_spread(best)} {after}, {_THREE(found.mean)} above "
            f"'{second.group.label}' ({_spread(second)}). With a single seed on a side that may be chance: more seeds "
            "would tell (basis-rl sweep --seeds 0,1,2)."
        )
    interval = f"{_interval(found)} (95 % interval over {found.n} seeds)"
    if _is_sure(found):
        return (
            f"'{best.group.label}' is ahead: it has {measure} {_spread(best)} {after}, {_THREE(found.mean)} "
            f"{interval} above the next, '{second.group.label}' ({_spread(second)})."
        )
    return (
        f"The seeds do not tell whether '{best.group.label}' or '{second.group.label}' is ahead: they have {measure} "
        f"{_spread(best)} and {_spread(second)} {after}; the difference is {_THREE(found.mean)} {interval}."
    )


def _others(places: list[_Place]) -> str:
    """How the best group stands to those after the second."""
    best = places[0]
    sure: list[str] = []
    open_: list[str] = []
    for place in places[2:]:
        found = _between(best, place)
        text = f"'{place.group.label}' ({signed(found.mean, _THREE)}{f' {_interval(found)}' if found.spread else ''})"
        (sure if _is_sure(found) else open_).append(text)
    parts = [f"is ahead of {_listed(sure)}"] if sure else []
    parts += [f"is not certain to be ahead of {_listed(open_)}"] if open_ else []
    return f"'{best.group.label}' {' and '.join(parts)}."


def _saved(best: Group, comparison: Comparison) -> str:
    """After how many rollouts the best group has the reference's reward at the end; empty if not all runs reach it."""
    budget, reference = comparison.budget, comparison.reference
    target = over_seeds([mean_until(run, "reward", budget, END) for run in reference.runs]).mean
    reached = [rollouts_to(run, target, budget) for run in best.runs]
    if best is reference or any(map(math.isnan, reached)):
        return ""
    whole, _ = table_price(best, table_uses(comparison))
    table = f"; its value table took {whole:,.0f} more, once" if whole else ""
    return (
        f"'{best.label}' has the training reward at which '{reference.label}' ends after {fmean(reached):,.0f} of the "
        f"{budget:,.0f} rollouts{table}."
    )


def _between(best: _Place, other: _Place) -> Estimate:
    return difference(best.group, best.values, other.group, other.values)


def _is_sure(found: Estimate) -> bool:
    return found.spread is not None and found.mean - found.spread > 0


def _interval(found: Estimate) -> str:
    assert found.spread is not None
    return f"[{signed(found.mean - found.spread, _THREE)}, {signed(found.mean + found.spread, _THREE)}]"


def _spread(place: _Place) -> str:
    found = over_seeds(place.values)
    return _THREE(found.mean) + (f" ± {_THREE(found.spread)}" if found.spread is not None else "")


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
