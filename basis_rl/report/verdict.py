"""The bottom line of a comparison in words: who is ahead, by how much, after how many rollouts, and how certainly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from basis_rl.report import compare
from basis_rl.report.compare import Comparison, Estimate, over_seeds
from basis_rl.report.runs import Group, Run
from basis_rl.report.tables import THREE, final_reward, interval, reference_reward, signed, table_price, with_spread

_REWARD = "a final training reward of"
# A group, and the value that each of its runs reached.
_Place = tuple[Group, list[float]]


def verdict(comparison: Comparison) -> list[str]:
    """One to four sentences; the first one is the answer.

    Measured is the mean over those evaluation sets on which all groups were evaluated, or else the training reward at
    the end. The group with the highest mean is ahead of another if the interval of their `difference` lies above 0.
    There is no verdict without an interval, and none by training rewards of groups that draw their prompts differently.
    """
    measure, value = _measure(comparison)
    places = [(group, [value(run) for run in group.runs]) for group in comparison.groups]
    places = sorted((place for place in places if over_seeds(place[1]).n), key=lambda place: -over_seeds(place[1]).mean)
    if not places:
        return ["No run has logged a reward, so there is nothing to compare."]
    best, *others = places
    leads = [compare.difference(*best, *other) for other in others]
    has = f"{measure} {_shown(best)}"
    after = f"after {comparison.budget:,.0f} rollouts"
    if not others:
        return [f"'{best[0].label}' has {has} {after}; there is nothing to compare it with."]
    # A sampler that draws easier prompts would win by that alone.
    if measure == _REWARD and len({group.settings.get("prompt_sampler") for group in comparison.groups}) > 1:
        rewards = ", ".join(f"'{group.label}' {with_spread(over_seeds(values), THREE)}" for group, values in places)
        return [
            "No verdict: the settings draw their prompts differently, so their training rewards come from different "
            f"prompts ({rewards} {after}). Only an evaluation (eval_strategy: steps) can compare them."
        ]
    said = [_first(best[0].label, others[0], leads[0], has, after)]
    if len(others) > 1:
        said.append(_others(best[0].label, others[1:], leads[1:]))
    if saved := _saved(best[0], comparison):
        said.append(saved)
    return said


def _measure(comparison: Comparison) -> tuple[str, Callable[[Run], float]]:
    """The measure that ranks the groups: its name, in words that a number can follow, and its value for a run."""
    common = {}
    for key in compare.evaluations(comparison.keys):
        value = partial(compare.last_until, key=key, budget=comparison.budget)
        if all(over_seeds([value(run) for run in group.runs]).n for group in comparison.groups):
            common[key] = value
    if not common:
        return _REWARD, final_reward(comparison.budget)
    what = f"a mean over {len(common)} evaluations of"
    if len(common) == 1:
        name = compare.evaluation_name(next(iter(common)))
        what = f"an evaluation ({name}) of" if name else "an evaluation reward of"
    return what, lambda run: fmean(value(run) for value in common.values())


def _shown(place: _Place) -> str:
    return with_spread(over_seeds(place[1]), THREE)


def _first(best: str, second: _Place, lead: Estimate, has: str, after: str) -> str:
    other = second[0].label
    size = THREE(lead.mean) + interval(lead, THREE)
    if lead.spread is None:
        found = (
            f"'{best}' and '{other}' end equal, with {has} {after}"
            if lead.mean == 0
            else f"'{best}' ends highest, with {has} {after}, {size} above '{other}' ({_shown(second)})"
        )
        return (
            f"No verdict: {found}, but at least one of the two has a single seed, and one seed shows no difference "
            "from chance. Run more seeds (basis-rl sweep --seeds 0,1,2)."
        )
    if lead.mean == 0:
        return f"'{best}' and '{other}' end equal over {lead.n} seeds: they have {has} {after}."
    over = f"(95 % interval over {lead.n} seeds)"
    if lead.excludes_zero:
        return f"'{best}' is ahead: it has {has} {after}, {size} {over} above the next, '{other}' ({_shown(second)})."
    return (
        f"The seeds do not show whether '{best}' or '{other}' is ahead: they have {has} and {_shown(second)} {after}; "
        f"the difference is {size} {over}."
    )


def _others(best: str, places: Sequence[_Place], leads: Sequence[Estimate]) -> str:
    """How the best group compares with the third and later ones."""
    parts = []
    for sure, words in ((True, "is ahead of"), (False, "is not certain to be ahead of")):
        found = [
            f"'{group.label}' ({signed(lead.mean, THREE)}{interval(lead, THREE)})"
            for (group, _), lead in zip(places, leads, strict=True)
            if lead.excludes_zero == sure
        ]
        parts += [f"{words} {', '.join(found)}"] if found else []
    return f"'{best}' {'; it '.join(parts)}."


def _saved(best: Group, comparison: Comparison) -> str:
    """After how many rollouts the best group reaches the reference's final reward; empty if not all its runs do."""
    target = reference_reward(comparison)
    reached = [compare.rollouts_to(run, target, comparison.budget) for run in best.runs]
    if best is comparison.reference or any(map(math.isnan, reached)):
        return ""
    whole, _ = table_price(best, comparison)
    table = f"; its value table took another {whole:,.0f} rollouts, once" if whole else ""
    return (
        f"'{best.label}' reaches the final training reward of '{comparison.reference.label}' after "
        f"{fmean(reached):,.0f} of the {comparison.budget:,.0f} rollouts{table}."
    )
