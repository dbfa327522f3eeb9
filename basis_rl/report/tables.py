"""The tables of a comparison, with cells of text; the HTML page and the Markdown file both show them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from basis_rl.report.compare import (
    END,
    Comparison,
    Estimate,
    difference,
    evaluation_name,
    evaluations,
    largest_passes,
    last_until,
    mean_until,
    over_seeds,
    rollouts_to,
)
from basis_rl.report.runs import EFFECTIVE, Group, Run, differing

NONE = "–"
_THREE = "{:.3f}".format


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        cells: its text.
        group: index of its group, None for a row of differences.
        strong: indices of the cells whose interval excludes 0.
    """

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
    show: Callable[[float], str]
    compared: bool = True


def tables(comparison: Comparison) -> list[Table]:
    """All tables that have content."""
    found = [final_table(comparison), cost_table(comparison), diagnostics_table(comparison)]
    return [table for table in found if table is not None]


def final_table(comparison: Comparison) -> Table:
    """As in Table 1 of the BASIS paper: one row per setting, followed by its differences from the reference."""
    budget = comparison.budget
    unit, seconds = time_unit(max(r.spent("seconds", budget) for g in comparison.groups for r in g.runs))
    measured = [*evaluations(comparison.groups), *largest_passes(comparison.groups)]
    accuracies = [_Column(_title(key), _measured(key, budget), _THREE) for key in measured]
    names = dict.fromkeys(name for group in comparison.groups for run in group.runs for name in run.benchmarks)
    accuracies += [_Column(name, _benchmark(name), _THREE) for name in names]
    columns = [
        _Column("reward at the end", lambda run: mean_until(run, "reward", budget, END), _THREE),
        *accuracies,
    ]
    if len(accuracies) > 1:
        columns.append(_Column("avg", lambda run: fmean(column.value(run) for column in accuracies), _THREE))
    columns += [
        _Column(f"time ({unit})", lambda run: run.spent("seconds", budget) / seconds, "{:.1f}".format),
        _Column("rollout tokens", lambda run: run.spent("num_rollout_tokens", budget), compact),
        _Column("steps", lambda run: run.spent("step", budget), "{:,.0f}".format, compared=False),
    ]
    rows, uses = [], table_uses(comparison)
    for index, group in enumerate(comparison.groups):
        group_size = group.runs[0].settings.get("num_generations")
        lead = [group.label, NONE if group_size is None else str(group_size), str(len(group.runs))]
        whole, _ = table_price(group, uses)
        price = [f"{whole:,.0f}" if whole else NONE] if uses else []
        rows.append(Row([*lead, *_cells(group, columns), *price], index))
        if group is not comparison.reference:
            rows.append(_differences(group, comparison.reference, columns, len(lead), len(price)))
    caption = (
        f"Every run is taken at {budget:,.0f} rollouts. The reward is the mean over the last tenth of them, an "
        "evaluation the last one within the budget. "
        + ("Benchmarks (avg@n) are of the final model. " if names else "")
        + "± is the standard deviation over the seeds. Δ is the difference, with its 95 % interval over the seeds in "
        "brackets (Student's t; paired if the seeds are the same), and bold if the interval excludes 0. With one seed "
        "there is no interval, and the difference may be chance."
    )
    titles = ["setting", "G", "runs", *(column.title for column in columns)]
    titles += ["rollouts of the value table"] if uses else []
    return Table("At the same number of rollouts", titles, rows, caption)


def cost_table(comparison: Comparison) -> Table:
    """Rollouts until the reference's final reward is reached, without and with those of the value table."""
    budget, reference = comparison.budget, comparison.reference
    target = over_seeds([mean_until(run, "reward", budget, END) for run in reference.runs]).mean
    unit, scale = time_unit(max(r.spent("seconds", budget) for g in comparison.groups for r in g.runs))
    uses, rows = table_uses(comparison), []
    for index, group in enumerate(comparison.groups):
        reached = [rollouts_to(run, target, budget) for run in group.runs]
        count = sum(not math.isnan(r) for r in reached)
        seconds = [run.spent("seconds", r) for run, r in zip(group.runs, reached, strict=True) if not math.isnan(r)]
        mean, (whole, share) = over_seeds(reached).mean, table_price(group, uses)
        shown = [NONE if math.isnan(mean) else f"{mean + extra:,.0f}" for extra in (0.0, whole, share)]
        time = f"{fmean(seconds) / scale:.1f}" if seconds else NONE
        rows.append(Row([group.label, f"{count} of {len(group.runs)}", time, *shown], index))
    titles = ["setting", "runs that reach it", f"time ({unit})", "rollouts"]
    titles += ["with the whole table", "with its share of the table"]
    caption = (
        f"Rollouts until the reward (mean over a window of a tenth of the budget) reaches {target:.3f}, the final "
        f"reward of '{reference.label}'; mean over the runs that reach it. A value table is sampled once, before "
        "training. Its rollouts are charged either to one run as a whole, or in equal shares to the runs of this "
        "comparison that used the same table. No table here includes the time and tokens of sampling it."
    )
    return Table("Rollouts to the reference's reward", titles, rows, caption)


def table_uses(comparison: Comparison) -> dict[str, int]:
    """How many of the runs used each value table, by the table's hash."""
    return Counter(run.table["sha256"] for group in comparison.groups for run in group.runs if run.table)


def table_price(group: Group, uses: Mapping[str, int]) -> tuple[float, float]:
    """Rollouts of the value tables that a group's runs used: those of the whole table, and the run's share of them.

    Both are means over the runs; a run without a value table counts as 0.
    """
    whole = [(run.table["rollouts"], uses[run.table["sha256"]]) if run.table else (0, 1) for run in group.runs]
    return fmean(price for price, _ in whole), fmean(price / users for price, users in whole)


# Title, metric, share of the budget that it is averaged over, format.
_DIAGNOSTICS: list[tuple[str, str, float, Callable[[float], str]]] = [
    ("(r - b)²", "baseline/mse_to_reward", 1.0, "{:.4f}".format),
    ("explained variance", "baseline/explained_variance", 1.0, "{:.1%}".format),
    ("effective signal", EFFECTIVE, 1.0, "{:.1%}".format),
    ("b exactly 0 or 1", "baseline/at_bounds", 1.0, "{:.1%}".format),
    ("β at the end", "baseline/beta", END, "{:.3g}".format),
    ("gradient: variance", "gradient/variance", 1.0, "{:.3g}".format),
    ("gradient: signal", "gradient/signal", 1.0, "{:.3g}".format),
    ("gradient: total power", "gradient/total_power", 1.0, "{:.3g}".format),
    ("entropy at the end", "entropy", END, "{:.3f}".format),
    ("KL at the end", "kl", END, "{:.3g}".format),
    ("tokens per rollout", "completions/mean_length", END, "{:.1f}".format),
    ("truncated", "completions/clipped_ratio", END, "{:.1%}".format),
]


def diagnostics_table(comparison: Comparison) -> Table | None:
    """Metrics of the baseline, the gradient and the policy; None if none was logged."""
    columns = []
    for title, key, share, show in _DIAGNOSTICS:
        column = _Column(title, _averaged(key, comparison.budget, share), show)
        if any(not math.isnan(column.value(run)) for group in comparison.groups for run in group.runs):
            columns.append(column)
    if not columns:
        return None
    rows = [Row([group.label, *_cells(group, columns)], i) for i, group in enumerate(comparison.groups)]
    caption = (
        "Values are means over the budget; those 'at the end', tokens and truncated are means over its last tenth. "
        "Effective signal is the share of rollouts whose advantage is not exactly 0. The gradient is measured per "
        "optimizer step, before clipping, if log_gradient_variance is true."
    )
    return Table("Baseline, gradient, policy", ["setting", *(column.title for column in columns)], rows, caption)


def settings_table(comparison: Comparison) -> Table | None:
    """The settings that differ between the recipes; None if there are none."""
    keys = differing([group.settings for group in comparison.groups])
    if not keys:
        return None
    cells = [[key, *(plain(group.settings.get(key)) for group in comparison.groups)] for key in keys]
    return Table("Settings that differ", ["key", *(g.label for g in comparison.groups)], [Row(c) for c in cells])


def runs_table(comparison: Comparison) -> Table:
    """The folder, state, machine and value table of each run."""
    rows = []
    for index, group in enumerate(comparison.groups):
        for run in group.runs:
            where = run.record.get("hardware", NONE)
            table = f"{run.table['sha256']}, {run.table['source']}" if run.table else NONE
            state = "finished" if run.finished else "not finished"
            cells = [group.label, plain(run.seed), str(run.path), f"{run.rollouts:,.0f}", state, where, table]
            rows.append(Row(cells, index))
    return Table("Runs", ["setting", "seed", "folder", "rollouts", "state", "machine", "value table"], rows)


def plain(value: object) -> str:
    """A setting as text."""
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _cells(group: Group, columns: Sequence[_Column]) -> list[str]:
    return [_estimate(over_seeds([column.value(run) for run in group.runs]), column.show) for column in columns]


def _estimate(found: Estimate, show: Callable[[float], str]) -> str:
    if math.isnan(found.mean):
        return NONE
    return f"{show(found.mean)} ± {show(found.spread)}" if found.spread else show(found.mean)


def _differences(group: Group, reference: Group, columns: Sequence[_Column], lead: int, trail: int) -> Row:
    cells, strong = [f"Δ vs {reference.label}", *[""] * (lead - 1)], set()
    for column in columns:
        sides = [[column.value(run) for run in side.runs] for side in (group, reference)]
        found = difference(group, sides[0], reference, sides[1])
        if not column.compared or math.isnan(found.mean):
            cells.append("")
            continue
        text = signed(found.mean, column.show)
        if found.spread is not None:
            low, high = found.mean - found.spread, found.mean + found.spread
            text += f" [{signed(low, column.show)}, {signed(high, column.show)}]"
            if low > 0 or high < 0:
                strong.add(len(cells))
        cells.append(text)
    return Row([*cells, *[""] * trail], None, strong)


def signed(value: float, show: Callable[[float], str]) -> str:
    """The value with its sign, which is a true minus sign (not a hyphen) below 0."""
    return ("−" if value < 0 else "+") + show(abs(value))


def compact(value: float) -> str:
    """``1.23M``, ``45.6k``, ``789``."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.0f}"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which the longest time is easy to read, and the number of seconds in it."""
    return ("h", 3600.0) if seconds >= 5400 else ("min", 60.0) if seconds >= 180 else ("s", 1.0)


def _title(key: str) -> str:
    return f"eval {evaluation_name(key) or 'reward'}"


def _measured(key: str, budget: float) -> Callable[[Run], float]:
    return lambda run: last_until(run, key, budget)


def _averaged(key: str, budget: float, share: float) -> Callable[[Run], float]:
    return lambda run: mean_until(run, key, budget, share)


def _benchmark(name: str) -> Callable[[Run], float]:
    return lambda run: run.benchmarks.get(name, math.nan)
