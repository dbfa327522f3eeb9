"""The bottom line of a comparison in words: who is ahead, by how much, and how certainly."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean

from basis_rl.report import compare
from basis_rl.report.compare import Comparison, over_seeds
from basis_rl.report.runs import Group, Run
from basis_rl.report.tables import THREE, interval, signed, with_spread

_REWARD = "final training reward"


def verdict(comparison: Comparison) -> list[str]:
    """Sentences, of which the first one is the answer.

    Measured is the mean over those evaluation sets on which all runs were evaluated after some training, or else the
    training reward at the end. The group with the highest mean is ahead of another if the interval of their
    `difference` lies above 0, and ahead if it is ahead of every other. There is no verdict without an interval, and
    none by training rewards where a group chooses its prompts.
    """
    measure, value, place = _measure(comparison)
    places = [(group, [value(run) for run in group.runs]) for group in comparison.groups]
    places = sorted((place for place in places if over_seeds(place[1]).n), key=lambda place: -over_seeds(place[1]).mean)
    if not places:
        return ["No run has logged a reward, so there is nothing to compare."]
    best, *others = places
    highest = f"'{best[0].label}' has the highest {measure} after {place:,.0f} rollouts, {_mean(best[1])}"
    if not others:
        return [f"{highest}; there is nothing to compare it with."]
    # Who draws easier prompts would win by that alone.
    if measure == _REWARD and any(_chooses_prompts(group) for group in comparison.groups):
        return [
            "No verdict: prompt_sampler or max_generations chooses which prompts get rollouts, so the training rewards "
            "of the settings come from different prompts. Only an evaluation (eval_strategy: steps) can compare them.",
            f"{highest}.",
        ]
    leads = [(*other, compare.difference(*best, *other)) for other in others]
    # The first one of whom the best is not certain to be ahead.
    rival, _, lead = next((each for each in leads if not each[2].excludes_zero), leads[0])
    if lead.excludes_zero:
        answer = f"'{best[0].label}' is ahead."
    elif lead.spread is None:
        answer = "No verdict: one seed shows no difference from chance. Run more (basis-rl sweep --seeds 0,1,2)."
    else:
        answer = f"No verdict: the seeds do not show whether '{best[0].label}' or '{rival.label}' is ahead."
    said = [answer, f"{highest}."]
    for sure, words in ((True, "It is ahead of"), (False, "It is not certain to be ahead of")):
        found = [
            f"'{group.label}' ({_mean(values)}, difference {signed(lead.mean, THREE)}{interval(lead, THREE)})"
            for group, values, lead in leads
            if lead.excludes_zero == sure
        ]
        said += [f"{words} {', '.join(found)}."] if found else []
    if len(places) > 2 and any(lead.excludes_zero for *_, lead in leads):
        # The highest of many means is high by chance, too: of 12 equal settings one is often ahead of another.
        said.append(
            f"Each interval is a 95 % interval by itself, and '{best[0].label}' was chosen as the best of "
            f"{len(places)} settings by these same seeds. Confirm it with seeds that were not used to choose it."
        )
    return said


def _chooses_prompts(group: Group) -> bool:
    """Whether a group's prompts, or their numbers of rollouts, depend on what it has learnt so far."""
    samplers = [group.settings.get(key, "uniform") for key in ("prompt_sampler", "sampler")]
    return samplers != ["uniform"] * 2 or "max_generations" in group.settings


def _mean(values: list[float]) -> str:
    return with_spread(over_seeds(values), THREE)


def _measure(comparison: Comparison) -> tuple[str, Callable[[Run], float], float]:
    """The measure that ranks the groups: its name, its value for a run, and the rollouts after which it is taken."""
    common = {}
    for key in compare.evaluations(comparison.keys):
        value = partial(compare.measured_at, key=key, place=comparison.evaluated)
        if not any(math.isnan(value(run)) for run in comparison.runs):
            common[key] = value
    if not common:
        return _REWARD, partial(compare.final_reward, budget=comparison.budget), comparison.budget
    name = compare.evaluation_name(next(iter(common))) if len(common) == 1 else f"mean over {len(common)} sets"
    what = f"evaluation ({name})" if name else "evaluation reward"
    return what, lambda run: fmean(value(run) for value in common.values()), comparison.evaluated
