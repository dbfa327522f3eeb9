"""The plots of a comparison: SVG for the HTML page, in colours that follow the reader's theme, and PNG for Markdown."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from basis_rl.report.compare import Comparison, Curve, curve, evaluation_name, evaluations, largest_passes, points
from basis_rl.report.runs import EFFECTIVE
from basis_rl.report.tables import table_price, table_uses, time_unit

# Okabe and Ito's colours, which colour-blind readers can tell apart, for white and lightened for a dark page. Further
# groups reuse them with another line style.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5c5c5c")
DARK = ("#4ba3dc", "#f08243", "#2cc59b", "#e193bd", "#9bd3f5", "#f2b632", "#b8b8b8")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":")
_GRID, _INK = "#d0d0d0", "#000000"
_WIDTH = 4.8
# An axis that is computed, not logged: rollouts of the training plus those of the value table.
TABLE = "with_table"

_AXES = {
    "num_rollouts": "rollouts",
    "num_rollout_tokens": "rollout tokens",
    "seconds": "time",
    "step": "optimizer step",
    TABLE: "rollouts, value table included",
}
# What the prompt sampler logs: key, title, whether it is a share.
_PROMPTS = (
    ("believed", "believed value of the prompts drawn", False),
    ("reward", "reward of the prompts drawn", False),
    ("believed_solved", "prompts believed to be solved", True),
    ("believed_impossible", "prompts believed to be impossible", True),
    ("effective_prompts", "prompts that a draw is spread over", True),
    ("coverage", "prompts ever drawn", True),
    ("ratio_clipped", "ratios to a uniform draw that were clipped", True),
    ("refills", "refills of a batch", False),
)
_LEARNING = ("num_rollouts", "num_rollout_tokens", "seconds")


@dataclass(frozen=True)
class Plot:
    """One metric over one axis."""

    name: str
    title: str
    key: str
    x: str = "num_rollouts"
    log: bool = False
    percent: bool = False
    measured: bool = False
    section: str = "Baseline, gradient, policy"


def plots(comparison: Comparison) -> list[Plot]:
    """The plots for which at least one run has logged something."""
    learning = "Learning curves"
    wanted = [Plot(f"reward_{x}", f"reward over {_AXES[x]}", "reward", x, section=learning) for x in _LEARNING]
    for key in evaluations(comparison.groups):
        name = evaluation_name(key)
        title = f"evaluation, {name}," if name else "evaluation"
        wanted += [
            Plot(f"{key}_{x}", f"{title} over {_AXES[x]}", key, x, measured=True, section=learning) for x in _LEARNING
        ]
    for key in largest_passes(comparison.groups):
        wanted.append(Plot(key, f"evaluation, {evaluation_name(key)}", key, measured=True, section=learning))
    if any(run.table for group in comparison.groups for run in group.runs):
        title = "reward with the value table (dashed: its share)"
        wanted.append(Plot("reward_table", title, "reward", TABLE, section=learning))
    wanted += [
        Plot("beta", "calibrated β", "baseline/beta", "step", log=True),
        Plot("mse", "mean of (r − b)²", "baseline/mse_to_reward"),
        Plot("explained", "variance of the reward that b explains", "baseline/explained_variance"),
        Plot("effective", "effective signal: A ≠ 0", EFFECTIVE, percent=True),
        Plot("gradient_variance", "variance of the gradient", "gradient/variance", log=True),
        Plot("gradient_signal", "signal |g|²", "gradient/signal", log=True),
        Plot("gradient_power", "total power", "gradient/total_power", log=True),
        Plot("length", "tokens per rollout", "completions/mean_length"),
        Plot("truncated", "truncated rollouts", "completions/clipped_ratio", percent=True),
        Plot("entropy", "entropy", "entropy"),
        Plot("kl", "KL to the reference", "kl"),
    ]
    for key, title, percent in _PROMPTS:
        wanted.append(Plot(f"sampler_{key}", title, f"sampler/{key}", percent=percent, section="Prompts"))
    return [plot for plot in wanted if any(lines(comparison, plot))]


def lines(comparison: Comparison, plot: Plot) -> list[Curve | None]:
    """The curve of each group, None for a group that has not logged the metric."""
    draw = points if plot.measured else curve
    return [draw(group, plot.key, comparison.budget) for group in comparison.groups]


def svg(comparison: Comparison, plot: Plot) -> str:
    """The plot as an ``<svg>`` element without a legend; its colours are CSS variables ``--run-0`` ..., ``--grid``."""
    buffer = io.StringIO()
    options = {"svg.fonttype": "none", "svg.hashsalt": plot.name}
    _draw(comparison, plot, buffer, options, legend=False, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", text)
    for index, color in enumerate(LIGHT):
        text = text.replace(color, f"var(--run-{index})")
    text = text.replace(_GRID, "var(--grid)").replace(_INK, "currentColor")
    head, rest = text.split(">", 1)  # the page sets the size
    return re.sub(r' (width|height)="[^"]*"', "", head) + ">" + rest


_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def png(comparison: Comparison, plot: Plot, path: Path) -> None:
    """Write the plot to a file, with a legend, on white."""
    _draw(comparison, plot, path, {}, legend=True, format="png", dpi=110, facecolor="white", transparent=False)


def _draw(
    comparison: Comparison, plot: Plot, target: Any, options: dict[str, Any], *, legend: bool, **saving: Any
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    height = 3.1 + (0.2 * len(comparison.groups) if legend else 0)
    with matplotlib.rc_context({"font.size": 10, "font.family": "sans-serif", **options}):
        curves = lines(comparison, plot)
        if plot.x == TABLE:
            figure, first = _with_tables(comparison, plot, curves, height)
        else:
            figure, first = plt.subplots(figsize=(_WIDTH, height))
            scale, unit = _scale(plot, [found for found in curves if found])
            for index, (group, found) in enumerate(zip(comparison.groups, curves, strict=True)):
                if found is not None:
                    _line(first, found.x[plot.x] / scale, found, index, label=group.label)
            _dress(first, plot, unit)
        if legend:
            handles, labels = first.get_legend_handles_labels()
            box = figure.legend(
                handles, labels, loc="upper left", bbox_to_anchor=(0.1, 0.02), fontsize=8, frameon=False
            )
            for text in box.get_texts():
                text.set_parse_math(False)
        figure.tight_layout()
        figure.savefig(target, **{"transparent": True, "bbox_inches": "tight", "pad_inches": 0.05, **saving})
        plt.close(figure)


def _with_tables(comparison: Comparison, plot: Plot, curves: Sequence[Curve | None], height: float) -> tuple[Any, Any]:
    """Curves that begin after the rollouts of their value tables, and the first axis, which has their labels.

    A table can be many times as large as the budget. The axis is then broken, so that a rollout has the same width in
    each part as it would have without tables.
    """
    from matplotlib import pyplot as plt

    prices, parts = _prices(comparison), table_parts(comparison)
    widths = [end - begin for begin, end in parts]
    size = (_WIDTH * min(2, len(parts)), height)
    figure, axes = plt.subplots(1, len(parts), figsize=size, sharey=True, squeeze=False, width_ratios=widths)
    for axis, limits in zip(axes[0], parts, strict=True):
        for index, (group, found) in enumerate(zip(comparison.groups, curves, strict=True)):
            if found is None:
                continue
            (whole, share), x = prices[index], found.x["num_rollouts"]
            _line(axis, x + whole, found, index, label=group.label)
            if share < whole:
                _line(axis, x + share, found, index, linestyle="--", band=False)
        _dress(axis, plot, "")
        axis.set_xlim(*limits)
        if axis is not axes[0, 0]:
            axis.set_title("", loc="left")
            axis.spines["left"].set_linestyle((0, (2, 3)))
            axis.tick_params(axis="y", length=0)
    if len(parts) > 1:
        for axis in axes[0]:
            axis.set_xlabel("")
        figure.supxlabel(_AXES[TABLE] + " (axis broken)", fontsize=10)
    return figure, axes[0, 0]


def _prices(comparison: Comparison) -> list[tuple[float, float]]:
    uses = table_uses(comparison)
    return [table_price(group, uses) for group in comparison.groups]


def table_parts(comparison: Comparison) -> list[tuple[float, float]]:
    """The parts of the axis of rollouts that includes the value tables; more than one if the axis is broken."""
    return stretches([begin for price in _prices(comparison) for begin in price], comparison.budget)


def stretches(begins: Sequence[float], length: float) -> list[tuple[float, float]]:
    """The parts of an axis for curves of the same `length` that begin at `begins`.

    A gap between two curves of at most half the length stays part of the axis; the axis is broken at a larger one.
    """
    found: list[tuple[float, float]] = []
    for begin in sorted(begins):
        if found and begin - found[-1][1] <= 0.5 * length:
            found[-1] = (found[-1][0], begin + length)
        else:
            found.append((begin, begin + length))
    if found and found[0][0] <= 0.5 * length:  # 0 is shown where it is near
        found[0] = (0.0, found[0][1])
    return found


def marker(index: int) -> int:
    """Index of a group's marker. Groups with the same colour have different markers."""
    return (index + index // len(_MARKERS)) % len(_MARKERS)


def _scale(plot: Plot, curves: Sequence[Curve]) -> tuple[float, str]:
    if plot.x != "seconds":
        return 1.0, ""
    unit, scale = time_unit(max(float(found.x["seconds"].max()) for found in curves))
    return scale, f" ({unit})"


def _line(axis: Any, x: np.ndarray, found: Curve, index: int, *, band: bool = True, **style: Any) -> None:
    color, line = LIGHT[index % len(LIGHT)], _LINES[index // len(LIGHT) % len(_LINES)]
    every = max(1, len(x) // 6)
    settings = {
        "color": color,
        "linestyle": line,
        "linewidth": 1.8,
        "marker": _MARKERS[marker(index)],
        "markersize": 5,
        "markevery": (index % every, every),
    }
    axis.plot(x, found.mean, **{**settings, **style})
    if band and found.y.shape[0] > 1:
        low, high = np.fmin.reduce(found.y, axis=0), np.fmax.reduce(found.y, axis=0)
        axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _dress(axis: Any, plot: Plot, unit: str) -> None:
    from matplotlib import ticker

    axis.set_title(plot.title, fontsize=11, loc="left", parse_math=False)
    axis.set_xlabel(_AXES[plot.x] + unit)
    axis.grid(color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(5))
    if plot.x in ("num_rollouts", "num_rollout_tokens", TABLE):
        axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axis.set_xlim(left=0)
    if plot.log and _positive(axis):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    elif plot.percent:
        low, high = axis.get_ylim()
        axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        axis.set_ylim(max(0.0, low), min(1.01, high))


def _positive(axis: Any) -> bool:
    values = [value for line in axis.get_lines() for value in line.get_ydata()]
    return all(math.isnan(value) or value > 0 for value in values)
