"""The bottom line of a comparison in words: who is ahead, by how much, after how many rollouts, and how certainly."""

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
    """A group and the value that each of its runs reached."""

    group: Group
    values: list[float]

    @property
    def mean(self) -> float:
        return over_seeds(self.values).mean


def verdict(comparison: Comparison) -> list[str]:
    """One to four sentences; the first one is the answer.

    The measure is the mean over those evaluation sets on which all groups were evaluated. If there is none, it is the
    training reward over the last tenth of the budget. The group with the highest mean is compared with each of the
    others by the interval of `difference`: it is ahead of a group if the interval lies above 0.
    """
    measure, value = _measure(comparison)
    places = [_Place(group, [value(run) for run in group.runs]) for group in comparison.groups]
    places = sorted((place for place in places if not math.isnan(place.mean)), key=lambda place: -place.mean)
    after = f"after {comparison.budget:,.0f} rollouts"
    if not places:
        return ["No run has logged a reward, so there is nothing to compare."]
    if len(places) == 1:
        only = places[0]
        return [f"'{only.group.label}' has {measure} {_spread(only)} {after}; there is nothing to compare it with."]
    said = [_first(places, measure, after)]
    if len(places) > 2:
        said.append(_others(places))
    if measure == _REWARD and len({group.settings.get("prompt_sampler") for group in comparison.groups}) > 1:
        said.append(
            "The settings draw their prompts differently, so their training rewards come from different prompts. Only "
            "an evaluation (eval_strategy: steps) can compare them."
        )
    elif saved := _saved(places[0].group, comparison):
        said.append(saved)
    return said


_REWARD = "a final training reward of"


def _measure(comparison: Comparison) -> tuple[str, Callable[[Run], float]]:
    """The measure that ranks the groups: its name, in words that a number can follow, and its value for a run."""
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
            f"'{second.group.label}' ({_spread(second)}). At least one of the two has a single seed, so the difference "
            "may be chance. Run more seeds to find out (basis-rl sweep --seeds 0,1,2)."
        )
    interval = f"{_interval(found)} (95 % interval over {found.n} seeds)"
    if _is_sure(found):
        return (
            f"'{best.group.label}' is ahead: it has {measure} {_spread(best)} {after}, {_THREE(found.mean)} "
            f"{interval} above the next, '{second.group.label}' ({_spread(second)})."
        )
    return (
        f"The seeds do not show whether '{best.group.label}' or '{second.group.label}' is ahead: they have {measure} "
        f"{_spread(best)} and {_spread(second)} {after}; the difference is {_THREE(found.mean)} {interval}."
    )


def _others(places: list[_Place]) -> str:
    """How the best group compares with the third and later ones."""
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
    """After how many rollouts the best group reaches the reference's final reward; empty if not all its runs do."""
    budget, reference = comparison.budget, comparison.reference
    target = over_seeds([mean_until(run, "reward", budget, END) for run in reference.runs]).mean
    reached = [rollouts_to(run, target, budget) for run in best.runs]
    if best is reference or any(map(math.isnan, reached)):
        return ""
    whole, _ = table_price(best, table_uses(comparison))
    table = f"; its value table took another {whole:,.0f} rollouts, once" if whole else ""
    return (
        f"'{best.label}' reaches the final training reward of '{reference.label}' after {fmean(reached):,.0f} of the "
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
