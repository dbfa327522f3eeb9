"""Evaluates the runs of `studies.policy.study`: pure functions of their measurements, and the plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from studies import drawing
from studies.training import LAST, levels

COLLAPSE = 0.1  # drop in accuracy that counts as a collapse


def spent_until(spent: Sequence[float], accuracy: Sequence[float], level: float, last: int = LAST) -> float | None:
    """What had been spent when `levels` first reached `level`, interpolated linearly between measurements.

    None if it never did.
    """
    held = levels(accuracy, last)
    for i, value in enumerate(held):
        if value >= level:
            if i == 0:
                return float(spent[0])
            share = (level - held[i - 1]) / (value - held[i - 1])
            return float(spent[i - 1] + share * (spent[i] - spent[i - 1]))
    return None


def collapsed(accuracy: Sequence[float], drop: float = COLLAPSE, last: int = LAST) -> bool:
    """Whether the level ends more than `drop` below its maximum."""
    held = levels(accuracy, last)
    return max(held) - held[-1] > drop


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def summary(runs: Sequence[dict[str, Any]], reference: str = "grpo G=8") -> list[dict[str, Any]]:
    """A line for each objective, learning rate and row, over its seeds.

    ``final`` is the level at the end. ``to_reference`` is the number of rollouts until the level reaches the final
    level of `reference` with the same objective, learning rate and seed, as a share of the budget. For rows with a
    value table ``to_reference_with_table`` charges the whole table to this one run. The reference's own line shows when
    it first reached its final level. ``never`` counts the seeds that do not reach it; they are not part of any spread.
    ``to_best`` and ``never_best`` are the same for the reference at its best learning rate (highest mean final level).
    """
    references: dict[tuple[tuple[str, float | None], int], dict[str, Any]] = {
        (_setting(run), run["seed"]): run for run in runs if run["row"] == reference
    }
    best_rate = {objective: best_of(references.values(), objective) for objective, _ in map(_setting, runs)}
    lines = []
    for setting, row in dict.fromkeys((_setting(run), run["row"]) for run in runs):
        own = [run for run in runs if (_setting(run), run["row"]) == (setting, row)]
        line: dict[str, Any] = {
            "objective": setting[0],
            "learning_rate": setting[1],
            "row": row,
            "seeds": [run["seed"] for run in own],
            "start": spread([run["accuracy"][0] for run in own]),
            "final": spread([levels(run["accuracy"])[-1] for run in own]),
            "best": spread([max(levels(run["accuracy"])) for run in own]),
            "collapsed": sum(collapsed(run["accuracy"]) for run in own),
            "cpu": spread([run["cpu"] for run in own]),
        }
        others = [references.get((setting, run["seed"])) for run in own]
        shares = [shares_of(run, other) for run, other in zip(own, others, strict=True) if other is not None]
        for name in dict.fromkeys(key for share in shares for key in share):
            line[name] = spread([share[name] for share in shares if share])
        best = [references.get(((setting[0], best_rate[setting[0]]), run["seed"])) for run in own]
        to_best = [shares_of(run, other) for run, other in zip(own, best, strict=True) if other is not None]
        if any(to_best):
            line["to_best"] = spread([share["to_reference"] for share in to_best if share])
        lines.append({**line, "never": shares.count({}), "never_best": to_best.count({})})
    return lines


def best_of(runs: Iterable[dict[str, Any]], objective: str) -> float | None:
    """The learning rate with the highest mean final level over seeds; None if there are fewer than two rates."""
    finals: dict[float, list[float]] = {}
    for run in runs:
        if run["objective"] == objective:
            finals.setdefault(run["learning_rate"], []).append(levels(run["accuracy"])[-1])
    return max(finals, key=lambda rate: float(np.mean(finals[rate]))) if len(finals) > 1 else None


def _setting(run: dict[str, Any]) -> tuple[str, float]:
    return run["objective"], run["learning_rate"]


def shares_of(run: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Rollouts until `run` reached the final level of `other`, as a share of all that `other` sampled.

    Empty if it never reached it.
    """
    spent = spent_until(run["rollouts"], run["accuracy"], levels(other["accuracy"])[-1])
    if spent is None:
        return {}
    budget = other["rollouts"][-1]
    shares = {"to_reference": spent / budget}
    if run.get("table"):
        shares["to_reference_with_table"] = (spent + run["table"]["rollouts"]) / budget
    return shares


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The `summary` as text."""
    head = (
        "objective    rate  row           seeds  final (min to max)       collapsed  share of the budget to G=8's final"
    )
    text = [head]
    for line in lines:
        final = line["final"]
        reached = "; ".join(
            (f"{line[key]['median']:.2f} ({line[key]['min']:.2f} to {line[key]['max']:.2f})" if key in line else "-")
            + (f", never {line[never]}" if line[never] else "")
            for key, never in (("to_reference", "never"), ("to_best", "never_best"))
        )
        text.append(
            f"{line['objective']:9} {line['learning_rate']:7.0e}  {line['row']:13} {len(line['seeds']):5}  "
            f"{final['median']:6.1%} ({final['min']:.1%} to {final['max']:.1%})  {line['collapsed']:9}  {reached}"
        )
    return "\n".join(text)


def draw(runs: Sequence[dict[str, Any]], rate: float, path: Path) -> None:
    """Plot, for the first objective, accuracy over rollouts at the learning rate `rate`, and the final level by rate.

    Shown are the mean over seeds, and a band from the smallest to the largest.
    """
    objective = runs[0]["objective"]
    rates = sorted({run["learning_rate"] for run in runs})
    with drawing.panels(path, 1, 2, width=5.0, height=3.7) as (left, right):
        drawing.title(left, f"objective {objective}, learning rate {rate:g}", "rollouts", "held-out accuracy, greedy")
        drawing.title(right, "at the end, by learning rate", "learning rate", "")
        for index, row in enumerate(dict.fromkeys(run["row"] for run in runs)):
            own = [run for run in runs if (run["objective"], run["row"]) == (objective, row)]
            curves = [run for run in own if run["learning_rate"] == rate]
            drawing.curves(left, [(run["rollouts"], run["accuracy"]) for run in curves], index, row)
            ends = {r: [levels(run["accuracy"])[-1] for run in own if run["learning_rate"] == r] for r in rates}
            if all(ends.values()) and len({len(finals) for finals in ends.values()}) == 1:
                drawing.band(right, rates, list(zip(*ends.values(), strict=True)), index, row)
        right.set_xscale("log")
        right.set_xticks(rates, [f"{rate:g}" for rate in rates])
        right.minorticks_off()
        for axis in (left, right):
            drawing.percent(axis)
        drawing.beside(right, left)
