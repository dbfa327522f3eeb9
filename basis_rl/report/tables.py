"""The tables of a comparison, with cells of text; the HTML page and the Markdown file both show them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from tqdm import tqdm

from basis_rl.report import compare
from basis_rl.report.compare import Comparison, Estimate, final_reward, over_seeds, rollouts_to
from basis_rl.report.runs import Group, Run, differing

NONE = "–"
THREE = "{:.3f}".format
_WHOLE = "{:,.0f}".format
_TENTH = "{:.1f}".format
Show = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """One row of a table: `group` is the index of its group, None for differences; `strong` are the cells in bold."""

    cells: list[str]
    group: int | None = None
    strong: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Table:
    """A table of plain text. The code that writes it out must escape the cells."""

    title: str
    columns: list[str]
    rows: list[Row]
    caption: str = ""


@dataclass(frozen=True)
class _Column:
    title: str
    value: Callable[[Run], float]
    show: Show
    compared: bool = True


def tables(comparison: Comparison) -> list[Table]:
    """The tables of results; `setup_tables` tell what was compared."""
    return [final_table(comparison), cost_table(comparison)]


def final_table(comparison: Comparison) -> Table:
    """As in Table 1 of the BASIS paper: one row per setting, followed by its differences from the reference."""
    groups = comparison.groups
    budget = comparison.budget
    place = comparison.evaluated
    accuracies = [_evaluated(key, place) for key in compare.evaluations(comparison.keys)]
    columns = [_Column("reward at the end", partial(final_reward, budget=budget), THREE), *accuracies]
    if len(accuracies) > 1:
        columns.append(_Column("avg", lambda run: fmean(column.value(run) for column in accuracies), THREE))
    columns += [
        *(_evaluated(key, place) for key in compare.largest_passes(comparison.keys)),
        _Column("time (min)", lambda run: run.spent("seconds", budget) / 60, _TENTH),
        _Column("rollout tokens", lambda run: run.spent("num_rollout_tokens", budget), tqdm.format_sizeof),
        _Column("steps", lambda run: run.spent("step", budget), _WHOLE, compared=False),
    ]
    rows = []
    for index, group in enumerate(groups):
        # Results come first: a phone shows the first two columns.
        last = [setting_text(group.runs[0].settings.get("num_generations")), str(len(group.runs))]
        rows.append(Row([group.label, *_cells(group, columns), *last], index))
        if group is not comparison.reference:
            rows.append(_differences(group, comparison.reference, columns, len(last)))
    of_evaluations = (
        f"Evaluations are compared at {place:,.0f} rollouts: all runs that were evaluated during training were "
        "evaluated at least up to there. Between two evaluations of a run its results are interpolated linearly. "
    )
    caption = (
        f"Every run is taken at {budget:,.0f} rollouts. The reward is the mean over the last tenth of them. "
        f"{of_evaluations if accuracies else ''}± is the standard deviation over the seeds. Δ is the difference, with "
        "its 95 % interval over the seeds in brackets (Student's t; paired if the seeds are the same), and bold if the "
        "interval excludes 0. One seed gives no interval."
    )
    titles = (column.title for column in columns)
    return Table("At the same number of rollouts", ["setting", *titles, "G", "runs"], rows, caption)


def _evaluated(key: str, place: float) -> _Column:
    title = f"eval {compare.evaluation_name(key) or 'reward'}"
    return _Column(title, partial(compare.measured_at, key=key, place=place), THREE)


def cost_table(comparison: Comparison) -> Table:
    """Rollouts until the reference's final reward is reached, without and with those of the value table."""
    budget = comparison.budget
    target = over_seeds([final_reward(run, budget) for run in comparison.reference.runs]).mean
    rows = []
    for index, group in enumerate(comparison.groups):
        reached = {run.path: rollouts_to(run, target, budget) for run in group.runs}
        found = over_seeds(list(reached.values()))
        time = over_seeds([run.spent("seconds", reached[run.path]) / 60 for run in group.runs])
        shown = [_WHOLE(found.mean + extra) if found.n else NONE for extra in (0.0, table_price(group))]
        rows.append(Row([group.label, *shown, with_spread(time, _TENTH), f"{found.n} of {len(group.runs)}"], index))
    caption = (
        f"Rollouts until the reward (mean over a window of a tenth of the budget) reaches {target:.3f}, the final "
        f"reward of '{comparison.reference.label}'; mean over the runs that reach it. A value table is sampled once, "
        "before training, and serves every run of its model; here each run pays for all of it. No table here includes "
        "the time and tokens of sampling it."
    )
    titles = ["setting", "rollouts", "with the value table", "time (min)", "runs that reach it"]
    return Table("Rollouts to the reference's reward", titles, rows, caption)


def table_price(group: Group) -> float:
    """Rollouts of the value table that a group's runs used, mean over the runs; one without a table counts as 0."""
    return fmean(run.table["rollouts"] if run.table else 0 for run in group.runs)


def setup_tables(comparison: Comparison) -> list[Table]:
    """The settings that differ between the recipes, if any; folder, state, machine and value table of each run."""
    keys = differing([group.settings for group in comparison.groups])
    settings = [Row([key, *(setting_text(group.settings.get(key)) for group in comparison.groups)]) for key in keys]
    rows = []
    for index, group in enumerate(comparison.groups):
        for run in group.runs:
            state = "finished" if run.finished else "not finished"
            table = f"{run.table['sha256']}, {run.table['source']}" if run.table else NONE
            cells = [group.label, setting_text(run.seed), str(run.path), _WHOLE(run.rollouts), state]
            rows.append(Row([*cells, run.info.get("hardware", NONE), table], index))
    found = [
        Table("Settings that differ", ["key", *(group.label for group in comparison.groups)], settings),
        Table("Runs", ["setting", "seed", "folder", "rollouts", "state", "machine", "value table"], rows),
    ]
    return [table for table in found if table.rows]


def setting_text(value: object) -> str:
    """A setting as text."""
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _cells(group: Group, columns: Sequence[_Column]) -> list[str]:
    return [with_spread(over_seeds([column.value(run) for run in group.runs]), column.show) for column in columns]


def with_spread(found: Estimate, show: Show) -> str:
    """``0.610 ± 0.014``."""
    if not found.n:
        return NONE
    return show(found.mean) + (f" ± {show(found.spread)}" if found.spread else "")


def _differences(group: Group, reference: Group, columns: Sequence[_Column], empty: int) -> Row:
    row = Row([f"Δ vs {reference.label}"])
    for column in columns:
        sides = [[column.value(run) for run in side.runs] for side in (group, reference)]
        found = compare.difference(group, sides[0], reference, sides[1])
        shown = column.compared and not math.isnan(found.mean)
        if shown and found.excludes_zero:
            row.strong.add(len(row.cells))
        row.cells.append(signed(found.mean, column.show) + interval(found, column.show) if shown else "")
    row.cells.extend([""] * empty)
    return row


def interval(found: Estimate, show: Show) -> str:
    """The interval of a difference in brackets, with a space before it; empty if there is none."""
    if found.spread is None:
        return ""
    return f" [{signed(found.mean - found.spread, show)}, {signed(found.mean + found.spread, show)}]"


def signed(value: float, show: Show) -> str:
    """The value with its sign, which is a true minus sign (not a hyphen) below 0."""
    return ("−" if value < 0 else "+") + show(abs(value))
