"""The tables of a comparison, as text in cells: what the page and the Markdown file both show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from basis_rl.report.compare import (
    END,
    Comparison,
    Estimate,
    difference,
    evaluations,
    last_until,
    mean_until,
    over_seeds,
    responses_to,
)
from basis_rl.report.runs import EFFECTIVE, Group, Run, differing

NONE = "–"


@dataclass(frozen=True)
class Row:
    """One line of a table. `group` is its index among the groups, None for a difference; `strong` are cells whose
    interval leaves out 0."""

    cells: list[str]
    group: int | None = None
    strong: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Table:
    """Cells are plain text; whoever writes them out escapes them."""

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
    """All tables, those without content left out."""
    found = [final_table(comparison), cost_table(comparison), diagnostics_table(comparison)]
    return [table for table in found if table is not None]


def final_table(comparison: Comparison) -> Table:
    """As BASIS Table 1: a row a setting, followed by its differences to the reference."""
    budget = comparison.budget
    unit, seconds = time_unit(max(r.spent("seconds", budget) for g in comparison.groups for r in g.runs))
    columns = [
        _Column("steps", lambda run: run.spent("step", budget), "{:,.0f}".format, compared=False),
        _Column("response tokens", lambda run: run.spent("num_response_tokens", budget), compact),
        _Column(f"time ({unit})", lambda run: run.spent("seconds", budget) / seconds, "{:.1f}".format),
        _Column("reward at the end", lambda run: mean_until(run, "reward", budget, END), "{:.3f}".format),
    ]
    keys = evaluations(comparison.groups)
    columns += [_Column(_title(key), _measured(key, budget), "{:.3f}".format) for key in keys]
    if len(keys) > 1:
        columns.append(_Column("eval avg", lambda run: _average(run, keys, budget), "{:.3f}".format))
    rows = []
    for index, group in enumerate(comparison.groups):
        group_size = group.runs[0].settings.get("num_generations")
        lead = [group.label, NONE if group_size is None else str(group_size), str(len(group.runs)), f"{budget:,.0f}"]
        rows.append(Row([*lead, *_cells(group, columns)], index))
        if group is not comparison.reference:
            rows.append(_differences(group, comparison.reference, columns, lead=len(lead)))
    caption = (
        f"Every run at {budget:,.0f} responses. Reward: mean over the last tenth of them. Evaluation: the last one "
        "within the budget. After ±, the standard deviation over the seeds. Δ: the 95 % interval over the seeds in "
        "brackets, bold where it leaves out 0 (paired where the seeds are the same, Student's t); one seed has no "
        "interval, and its difference may be chance."
    )
    titles = ["setting", "G", "runs", "responses", *(column.title for column in columns)]
    return Table("At the same number of responses", titles, rows, caption)


def cost_table(comparison: Comparison) -> Table:
    """Responses until the reference's reward at the end is reached, without and with the price of the value table."""
    budget, reference = comparison.budget, comparison.reference
    target = over_seeds([mean_until(run, "reward", budget, END) for run in reference.runs]).mean
    uses: dict[str, int] = {}
    for run in (run for group in comparison.groups for run in group.runs if run.table):
        uses[run.table["id"]] = uses.get(run.table["id"], 0) + 1  # type: ignore[index]
    rows = []
    for index, group in enumerate(comparison.groups):
        reached = [responses_to(run, target, budget) for run in group.runs]
        count = sum(not math.isnan(r) for r in reached)
        price = [float(run.table["responses"]) if run.table else 0.0 for run in group.runs]
        shared = [p / uses[run.table["id"]] if run.table else 0.0 for run, p in zip(group.runs, price, strict=True)]
        totals = [reached, *([r + p for r, p in zip(reached, cost, strict=True)] for cost in (price, shared))]
        means = [over_seeds(values).mean for values in totals]
        shown = [NONE if math.isnan(mean) else f"{mean:,.0f}" for mean in means]
        once = f"{max(price):,.0f}" if max(price) else NONE
        rows.append(Row([group.label, f"{count} of {len(group.runs)}", shown[0], once, shown[1], shown[2]], index))
    titles = ["setting", "runs that reach it", "responses", "value table, once", "with all of it", "with its share"]
    caption = (
        f"Responses until the reward (mean over a window of a tenth of the budget) is at {target:.3f}, the end of "
        f"'{reference.label}'; mean over the runs that get there. A value table is sampled once, before training: "
        "charged to one run with all of it, or shared by the runs of this comparison that used the same table. Its "
        "time and tokens are not in the other tables."
    )
    return Table("Responses to the reference's reward", titles, rows, caption)


# Title, metric, share of the budget that it is averaged over, format.
_DIAGNOSTICS: list[tuple[str, str, float, Callable[[float], str]]] = [
    ("(r - b)²", "baseline/mse_to_reward", 1.0, "{:.4f}".format),
    ("effective signal", EFFECTIVE, 1.0, "{:.1%}".format),
    ("b exactly 0 or 1", "baseline/at_bounds", 1.0, "{:.1%}".format),
    ("β at the end", "baseline/beta", END, "{:.3g}".format),
    ("gradient: variance", "gradient/variance", 1.0, "{:.3g}".format),
    ("gradient: signal", "gradient/signal", 1.0, "{:.3g}".format),
    ("gradient: total power", "gradient/total_power", 1.0, "{:.3g}".format),
    ("entropy at the end", "entropy", END, "{:.3f}".format),
    ("KL at the end", "kl", END, "{:.3g}".format),
    ("tokens a response", "completions/mean_length", END, "{:.1f}".format),
    ("truncated", "completions/clipped_ratio", END, "{:.1%}".format),
]


def diagnostics_table(comparison: Comparison) -> Table | None:
    """What was logged of baseline, gradient and policy."""
    columns = []
    for title, key, share, show in _DIAGNOSTICS:
        column = _Column(title, _averaged(key, comparison.budget, share), show)
        if any(not math.isnan(column.value(run)) for group in comparison.groups for run in group.runs):
            columns.append(column)
    if not columns:
        return None
    rows = [Row([group.label, *_cells(group, columns)], i) for i, group in enumerate(comparison.groups)]
    caption = (
        "Means over the budget; 'at the end', tokens and truncated: over its last tenth. Effective signal: share of "
        "responses whose advantage is not exactly 0. Gradient: per optimizer step, before clipping, with "
        "log_gradient_variance: true."
    )
    return Table("Baseline, gradient, policy", ["setting", *(column.title for column in columns)], rows, caption)


def settings_table(comparison: Comparison) -> Table | None:
    """What differs between the recipes."""
    keys = differing([group.settings for group in comparison.groups])
    if not keys:
        return None
    cells = [[key, *(plain(group.settings.get(key)) for group in comparison.groups)] for key in keys]
    return Table("Settings that differ", ["key", *(g.label for g in comparison.groups)], [Row(c) for c in cells])


def runs_table(comparison: Comparison) -> Table:
    """Where each run lies and what it ran on."""
    rows = []
    for index, group in enumerate(comparison.groups):
        for run in group.runs:
            machine = run.record.get("machine", {})
            where = " x ".join(str(machine[key]) for key in ("processes", "device") if key in machine) or NONE
            table = f"{run.table['id']}, {run.table['source']}" if run.table else NONE
            state = "finished" if run.finished else "not finished"
            cells = [group.label, plain(run.seed), str(run.path), f"{run.responses:,.0f}", state, where, table]
            rows.append(Row(cells, index))
    return Table("Runs", ["setting", "seed", "folder", "responses", "state", "machine", "value table"], rows)


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
    return show(found.mean) if found.spread is None else f"{show(found.mean)} ± {show(found.spread)}"


def _differences(group: Group, reference: Group, columns: Sequence[_Column], lead: int) -> Row:
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
    return Row(cells, None, strong)


def signed(value: float, show: Callable[[float], str]) -> str:
    """With its sign: a true minus sign below 0."""
    return ("−" if value < 0 else "+") + show(abs(value))


def compact(value: float) -> str:
    """``1.23M``, ``45.6k``, ``789``."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.0f}"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which the longest time is easy to read, and its seconds."""
    return ("h", 3600.0) if seconds >= 5400 else ("min", 60.0) if seconds >= 180 else ("s", 1.0)


def _title(key: str) -> str:
    return "eval reward" if key == "eval_reward" else "eval " + key.removeprefix("eval_").removesuffix("_reward")


def _measured(key: str, budget: float) -> Callable[[Run], float]:
    return lambda run: last_until(run, key, budget)


def _averaged(key: str, budget: float, share: float) -> Callable[[Run], float]:
    return lambda run: mean_until(run, key, budget, share)


def _average(run: Run, keys: Sequence[str], budget: float) -> float:
    return sum(last_until(run, key, budget) for key in keys) / len(keys)
