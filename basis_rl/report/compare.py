"""Runs compared at the same number of rollouts: curves, final values, differences."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd

from basis_rl.report.runs import Group, Run, differing, find_runs, group_runs, read_run

# "At the end" is the last tenth of the budget.
END = 0.1
_MOST_BINS = 50
# What runs should have in common: data, problems to evaluate on, rewards and model.
_IN_COMMON = re.compile(
    r"dataset_.*|(prompt|solution|context|choices)_(column|template|pattern|list)|system_prompt|data"
    r"|eval_benchmarks|max_eval_samples|test_fraction|reward(_.*)?|model_(name_or_path|revision)|base_(model|revision)"
)
_RECORDED = ("data", "reward", "base_model", "base_revision")
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them the last one.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Comparison:
    """Groups of runs that have all sampled at least `budget` rollouts, and notes on runs that were left out."""

    groups: list[Group]
    reference: Group
    budget: float
    notes: list[str]

    @property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]

    @property
    def keys(self) -> set[str]:
        """Every key that a run has logged."""
        return {key for run in self.runs for key in run.log}

    @property
    def evaluated(self) -> float:
        """The rollouts, at most the budget, up to which all those runs were evaluated that ever were after training."""
        places = [run.series(key)[0] for run in self.runs for key in evaluations(self.keys)]
        return min([self.budget, *(float(x[-1]) for x in places if x.any())])


@dataclass(frozen=True)
class Curve:
    """A metric of a group, `y` of ``(runs, K)``, after `x` rollouts, ``(K,)``; NaN where a run has no value."""

    x: np.ndarray
    y: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return np.ma.masked_invalid(self.y).mean(axis=0).filled(math.nan)


def compare_runs(folders: Sequence[str | Path], *, reference: str | None = None) -> Comparison:
    """Read the runs in `folders`, group them by their settings, and compare them at the number of rollouts that every
    one of them has sampled.

    The others are compared with the first group; a `reference` is the label of a group, or the folder name of one of
    its runs.

    Raises:
        ValueError: a folder is not a run and contains none, or the reference is unknown.
    """
    runs, notes = _read(folders)
    shortest = min(runs, key=lambda run: run.rollouts)
    if not shortest.finished and max(run.rollouts for run in runs) > shortest.rollouts:
        notes.append(
            f"The budget is the number of rollouts of '{shortest.path.name}', which has not finished. Leave this run "
            "out for a larger one."
        )
    groups = group_runs(runs)
    for group in groups:
        if len({str(run.seed) for run in group.runs}) < len(group.runs):
            notes.append(f"'{group.label}' has several runs with the same seed; each of them counts as one run.")
    # Runs of one group, too: the problems to evaluate on do not change what a run learns.
    said = [{**{key: run.info.get(key) for key in _RECORDED}, **run.settings} for run in runs]
    if unlike := list(filter(_IN_COMMON.fullmatch, differing(said))):
        notes.append(f"The runs differ in more than their method ({', '.join(unlike)}), so their results may, too.")
    found = [group for group in groups if reference in (None, group.label)]
    found += [group for group in groups if reference in [run.path.name for run in group.runs]]
    if not found:
        labels = ", ".join(group.label for group in groups)
        raise ValueError(f"There is no '{reference}' to compare with. Choose one of: {labels}.")
    comparison = Comparison(groups, found[0], shortest.rollouts, notes)
    if comparison.evaluated < comparison.budget:
        notes.append(
            f"Evaluations are compared after {comparison.evaluated:,.0f} of the {comparison.budget:,.0f} rollouts, "
            "because not every run was evaluated later."
        )
    return comparison


def _read(folders: Sequence[str | Path]) -> tuple[list[Run], list[str]]:
    """The runs that can be read, and a note on each of the others; the error itself if none can be read."""
    runs = []
    errors = []
    for path in find_runs(folders):
        try:
            runs.append(read_run(path))
        except (ValueError, OSError) as error:
            errors.append(str(error))
    if not runs:
        raise ValueError("\n".join(errors))
    return runs, [f"A run was left out: {error}" for error in errors]


def window_mean(x: np.ndarray, y: np.ndarray, low: Any, high: Any) -> Any:
    """Mean over the rollouts in ``(low, high]``, numbers or arrays, where ``y_i`` stands for ``(x_{i-1}, x_i]``; NaN if
    there are none."""
    edges = np.append(0.0, x)
    sums = np.append(0.0, np.cumsum(y * np.diff(edges)))
    gained = np.interp(high, edges, sums) - np.interp(low, edges, sums)
    width = np.minimum(high, edges[-1]) - np.minimum(low, edges[-1])
    return np.divide(gained, width, out=np.full(np.shape(width), math.nan), where=width > 0)[()]


def final_reward(run: Run, budget: float) -> float:
    """The training reward of a run at the end of the budget."""
    return float(window_mean(*run.series("reward"), budget - END * budget, budget))


def measured_at(run: Run, key: str, place: float) -> float:
    """A metric that is measured from time to time (evaluation), after a number of rollouts.

    It is interpolated linearly between two measurements; NaN before the first and after the last one.
    """
    x, y = run.series(key)
    return float(np.interp(place, x, y, left=math.nan, right=math.nan)) if len(x) else math.nan


def rollouts_to(run: Run, target: float, budget: float) -> float:
    """The first number of rollouts at which the mean reward of the preceding tenth of the budget reaches `target`.

    It is checked at each logged value from the first whole window on, and at the budget; NaN if it is not reached.
    """
    x, y = run.series("reward")
    width = END * budget
    places = np.append(x[(x >= width) & (x < budget)], budget)
    # Runs with the same rewards that were logged elsewhere differ in the last digits.
    reached = places[window_mean(x, y, places - width, places) >= target - 1e-9 * (1 + abs(target))]
    return float(reached[0]) if len(reached) else math.nan


def curve(group: Group, key: str, budget: float) -> Curve | None:
    """A metric binned over rollouts; None if no run of the group logged it.

    There are at most 50 bins, and no more bins than any of the runs has logged values within the budget.
    """
    series = [run.series(key) for run in group.runs]
    counts = [int((x < budget).sum()) + 1 for x, _ in series if len(x)]
    if not counts:
        return None
    # With more bins than logged values, some bins would repeat their neighbours.
    edges = np.linspace(0.0, budget, min(_MOST_BINS, *counts) + 1)
    y = [window_mean(*each, edges[:-1], edges[1:]) for each in series]
    return Curve((edges[1:] + edges[:-1]) / 2, np.array(y))


def points(group: Group, key: str, budget: float) -> Curve | None:
    """A metric that is measured from time to time (evaluation), as it was measured; None if no run logged it.

    Runs that measured at other places than the first run are interpolated linearly to the places of the first run.
    """
    series = [(x[x <= budget], y[x <= budget]) for x, y in (run.series(key) for run in group.runs)]
    series = [(x, y) for x, y in series if len(x)]
    if not series:
        return None
    places = series[0][0]
    return Curve(places, np.array([np.interp(places, x, y, left=math.nan, right=math.nan) for x, y in series]))


def evaluations(keys: Collection[str]) -> list[str]:
    """Those keys of a log that are results of evaluations, the shorter ones first.

    Of an evaluation set it is ``avg@k`` if that was logged, else ``reward``, a mean of batch means.
    """
    found = _matching(keys, r"(eval_(?:[^/]+_)?)(avg@\d+|reward)")
    exact = {key[1] for key in found if key[2] != "reward"}
    return [key[0] for key in found if key[2] != "reward" or key[1] not in exact]


def largest_passes(keys: Collection[str]) -> list[str]:
    """Those keys of a log that are ``pass@k`` of an evaluation set, for the largest k that was logged."""
    return list({key[1]: key[0] for key in _matching(keys, r"(eval_(?:[^/]+_)?pass@)\d+")}.values())


def _matching(keys: Collection[str], pattern: str) -> list[re.Match[str]]:
    """The keys that match the pattern, the shorter ones first, so that of two numbers the smaller is."""
    return [found for key in sorted(keys, key=lambda key: (len(key), key)) if (found := re.fullmatch(pattern, key))]


def evaluation_name(key: str) -> str:
    """A key of `evaluations` or `largest_passes` as shown to the reader: the set's name, and avg@k or pass@k."""
    return re.sub(r"_(avg|pass)@", r" \1@", re.sub(r"_?reward$", "", key.removeprefix("eval_")))


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds, or a difference of two means.

    `spread` is the standard deviation or, of a difference, half the width of its 95 % interval; None for a single seed.
    """

    mean: float
    spread: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Of a difference: whether its interval lies on one side of 0."""
        # Equal values that were interpolated differ in the last digits.
        return self.spread is not None and abs(self.mean) > self.spread + 1e-9


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean and standard deviation (n - 1) of the values that are not NaN."""
    known = [value for value in values if not math.isnan(value)]
    spread = stdev(known) if len(known) > 1 else None
    return Estimate(fmean(known) if known else math.nan, spread, len(known))


def difference(group: Group, values: Sequence[float], other: Group, others: Sequence[float]) -> Estimate:
    """``mean(values) - mean(others)`` with half the width of its 95 % interval over seeds (Student's t).

    Runs with the same seeds are paired: ``t sd(d) / sqrt(n)`` of ``d_s = a_s - b_s``. Otherwise it is Welch's interval,
    ``t sqrt(s_a^2 / n_a + s_b^2 / n_b)``, with the degrees of freedom rounded down; none if a side has only one run.
    """
    sides = ((group, values), (other, others))
    a, b = (pd.Series(found, [str(run.seed) for run in side.runs], float).dropna() for side, found in sides)
    mean = float(a.mean() - b.mean())
    n = min(len(a), len(b))
    if n < 2:
        return Estimate(mean, None, n)
    if len(a) == len(b) == len({*a.index}) and {*a.index} == {*b.index}:
        # Runs of one seed have the same prompts in the same order, so pairing them removes that part of the spread.
        return Estimate(mean, _t(n - 1) * float((a - b).std()) / math.sqrt(n), n)
    parts = [float(a.var()) / len(a), float(b.var()) / len(b)]
    below = parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1)
    # Welch-Satterthwaite; without spread on either side the cautious choice.
    freedom = sum(parts) ** 2 / below if below else 1
    return Estimate(mean, _t(int(freedom)) * math.sqrt(sum(parts)), n)


def _t(freedom: int) -> float:
    return _T[min(max(1, freedom), len(_T)) - 1]
