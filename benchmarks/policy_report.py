"""What the runs of `policy_study` say: pure functions of their measurements, and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

LAST = 4  # measurements that make a level
COLLAPSE = 0.1  # of accuracy


def levels(accuracy: Sequence[float], last: int = LAST) -> list[float]:
    """The mean of each measurement and up to ``last - 1`` before it: a level is known only when it has been held."""
    return [float(np.mean(accuracy[max(0, i + 1 - last) : i + 1])) for i in range(len(accuracy))]


def spent_until(spent: Sequence[float], accuracy: Sequence[float], level: float, last: int = LAST) -> float | None:
    """What had been spent when the level (`levels`) first was at least `level`, linear between measurements.

    None if it never was.
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
    """Median, least and largest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def summary(runs: Sequence[dict[str, Any]], reference: str = "grpo G=8") -> list[dict[str, Any]]:
    """A line for each objective and row, over its seeds.

    ``final``: the level at the end. ``to_reference``: responses until the level is the final one of `reference` at the
    same objective and seed, as a share of the budget; ``cpu_to_reference`` the same of its processor seconds; both also
    ``_with_table``, the whole value table paid by this one run, for rows that have one. ``never`` counts the seeds that
    do not get there; they are in no spread.
    """
    finals = {(run["objective"], run["row"], run["seed"]): levels(run["accuracy"])[-1] for run in runs}
    by_key = {(run["objective"], run["row"], run["seed"]): run for run in runs}
    lines = []
    for objective, row in dict.fromkeys((run["objective"], run["row"]) for run in runs):
        own = [run for run in runs if (run["objective"], run["row"]) == (objective, row)]
        line: dict[str, Any] = {
            "objective": objective,
            "row": row,
            "seeds": [run["seed"] for run in own],
            "start": spread([run["accuracy"][0] for run in own]),
            "final": spread([levels(run["accuracy"])[-1] for run in own]),
            "best": spread([max(levels(run["accuracy"])) for run in own]),
            "collapsed": sum(collapsed(run["accuracy"]) for run in own),
            "cpu": spread([run["cpu"][-1] for run in own]),
        }
        reached: dict[str, list[float]] = {}
        never = 0
        for run in own:
            key = (objective, reference, run["seed"])
            if row == reference or key not in finals:
                continue
            responses = spent_until(run["responses"], run["accuracy"], finals[key])
            if responses is None:
                never += 1
                continue
            cpu = spent_until(run["cpu"], run["accuracy"], finals[key])
            assert cpu is not None
            other = by_key[key]
            for name, spent in (("responses", responses), ("cpu", cpu)):
                prefix = "to_reference" if name == "responses" else "cpu_to_reference"
                reached.setdefault(prefix, []).append(spent / other[name][-1])
                if run.get("table"):
                    whole = (spent + run["table"][name]) / other[name][-1]
                    reached.setdefault(f"{prefix}_with_table", []).append(whole)
        lines.append({**line, **{name: spread(values) for name, values in reached.items()}, "never": never})
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """`summary` for the terminal."""
    head = "objective  row          seeds  final (min to max)       collapsed  share of the budget to reach G=8's final"
    text = [head]
    for line in lines:
        final = line["final"]
        share = line.get("to_reference")
        reached = f"{share['median']:.2f} ({share['min']:.2f} to {share['max']:.2f})" if share else "-"
        reached += f", never {line['never']}" if line["never"] else ""
        text.append(
            f"{line['objective']:10} {line['row']:12} {len(line['seeds']):5}  {final['median']:6.1%} "
            f"({final['min']:.1%} to {final['max']:.1%})  {line['collapsed']:9}  {reached}"
        )
    return "\n".join(text)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over responses and over processor seconds, an objective a column; below, the calibrated beta."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    from basis_rl.report.plots import LIGHT

    objectives = list(dict.fromkeys(run["objective"] for run in runs))
    rows = list(dict.fromkeys(run["row"] for run in runs))
    figure, axes = plt.subplots(
        3, len(objectives), figsize=(4.2 * len(objectives), 8.4), squeeze=False, sharey="row", layout="constrained"
    )
    for column, objective in enumerate(objectives):
        for number, row in enumerate(rows):
            own = [run for run in runs if (run["objective"], run["row"]) == (objective, row)]
            for axis, spent in zip(axes[:2, column], ("responses", "cpu"), strict=True):
                _band(axis, [(run[spent], run["accuracy"]) for run in own], LIGHT[number % len(LIGHT)], row)
            betas = [run["log"] for run in own if "baseline/beta" in run["log"]]
            _band(
                axes[2, column], [(log["num_responses"], log["baseline/beta"]) for log in betas],
                LIGHT[number % len(LIGHT)], row,
            )  # fmt: skip
        axes[0, column].set_title(f"objective {objective}", loc="left")
        for axis, label in zip(axes[:, column], ("responses", "processor seconds", "responses"), strict=True):
            axis.set_xlabel(label)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        axes[2, column].set_yscale("log")
        axes[2, column].yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes[2, column].yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes[2, column].yaxis.set_minor_formatter(ticker.NullFormatter())
    for axis, label in zip(axes[:, 0], ("held-out accuracy, greedy",) * 2 + ("calibrated β",), strict=True):
        axis.set_ylabel(label)
    for axis in axes[:2].flat:
        axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    axes[0, 0].legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _band(axis: Any, curves: Sequence[tuple[Sequence[float], Sequence[float]]], color: str, label: str) -> None:
    """The mean over the seeds, and from the least to the largest; x is the seeds' mean too."""
    if not curves:
        return
    count = min(len(y) for _, y in curves)
    x = np.mean([x[:count] for x, _ in curves], axis=0)
    ys = np.array([y[:count] for _, y in curves])
    axis.plot(x, ys.mean(axis=0), color=color, label=label, linewidth=1.6)
    axis.fill_between(x, ys.min(axis=0), ys.max(axis=0), color=color, alpha=0.15, linewidth=0)
