"""The plots of a comparison, SVG for the page and PNG for Markdown, and of one run; matplotlib is imported late."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from basis_rl.report import compare
from basis_rl.report.compare import Comparison, Curve, evaluation_name
from basis_rl.report.tables import table_price

# Okabe and Ito's colours, which colour-blind readers can tell apart, for white and lightened for a dark page. Further
# groups reuse them with another line style.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5c5c5c")
DARK = ("#4ba3dc", "#f08243", "#2cc59b", "#e193bd", "#9bd3f5", "#f2b632", "#b8b8b8")
# matplotlib's names of the markers, and the characters of the page's legend that look like them.
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖"}
_LINES = ("-", "--", "-.", ":")
_GRID = "#d0d0d0"
_INK = "#000000"
_SAVED: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.05}
# An axis that is computed, not logged: rollouts of the training plus those of the value table.
TABLE = "with_table"


@dataclass(frozen=True)
class Metric:
    """A key of the log, drawn over `x`."""

    title: str
    key: str
    percent: bool = False
    log: bool = False
    x: str = "num_rollouts"
    section: str = "Baseline, gradient, policy"


# Shares of the time that trainer and server waited for each other.
WAITED = ("rollout/waited_share", "rollout/server_waited_share")
_prompts = partial(Metric, section="Prompts")
_streamed = partial(Metric, section="Streamed rollouts")
METRICS = [
    Metric("calibrated β", "baseline/beta", log=True, x="step"),
    Metric("mean of (r − b)²", "baseline/mse_to_reward"),
    Metric("explained variance", "baseline/explained_variance", percent=True),
    Metric("rollouts that teach nothing", "advantages/zero", percent=True),
    Metric("b exactly 0 or 1", "baseline/at_bounds", percent=True),
    Metric("variance of the gradient", "gradient/variance", log=True),
    Metric("signal |g|² of the gradient", "gradient/signal", log=True),
    Metric("total power of the gradient", "gradient/total_power", log=True),
    Metric("tokens per rollout", "completions/mean_length"),
    Metric("truncated rollouts", "completions/clipped_ratio", percent=True),
    Metric("entropy", "entropy"),
    Metric("KL to the reference", "kl"),
    _prompts("believed value of the prompts drawn", "sampler/believed"),
    _prompts("reward of the prompts drawn", "sampler/reward"),
    _prompts("prompts believed to be solved", "sampler/believed_solved", percent=True),
    _prompts("prompts believed to be impossible", "sampler/believed_impossible", percent=True),
    _prompts("prompts that a draw is spread over", "sampler/effective_prompts", percent=True),
    _prompts("prompts ever drawn", "sampler/coverage", percent=True),
    _prompts("ratios to a uniform draw that were clipped", "sampler/ratio_clipped", percent=True),
    _prompts("refills of a batch", "sampler/refills"),
    _streamed("staleness in optimizer steps", "rollout/staleness"),
    _streamed("share of the time that the trainer waited", WAITED[0], percent=True),
    _streamed("share of the time that the server waited", WAITED[1], percent=True),
]
_WAITING = Metric("share of the time that each side waited", WAITED[0], percent=True)
_OF_A_RUN = ("baseline/beta", "baseline/mse_to_reward", "rollout/staleness")
_AXES = {
    "num_rollouts": "rollouts",
    "num_rollout_tokens": "rollout tokens",
    "seconds": "time",
    "step": "optimizer step",
    TABLE: "rollouts, value table included",
}


def plots(comparison: Comparison) -> list[Metric]:
    """The plots for which at least one run has logged something."""
    titles = {"reward": "reward"}
    for key in [*compare.evaluations(comparison.keys), *compare.largest_passes(comparison.keys)]:
        titles[key] = f"evaluation, {evaluation_name(key)}".strip(", ")
    learning = partial(Metric, section="Learning curves")
    wanted = [
        learning(f"{title} over {_AXES[x]}", key, x=x)
        for key, title in titles.items()
        for x in ("num_rollouts", "num_rollout_tokens", "seconds")
    ]
    if any(run.table for run in comparison.runs):
        wanted.append(learning("reward with the value table", "reward", x=TABLE))
    return [plot for plot in [*wanted, *METRICS] if any(lines(comparison, plot))]


def lines(comparison: Comparison, plot: Metric) -> list[Curve | None]:
    """The curve of each group, None for a group that has not logged the metric."""
    draw = compare.points if plot.key.startswith("eval_") else compare.curve
    return [draw(group, plot.key, comparison.budget) for group in comparison.groups]


def svg(comparison: Comparison, plot: Metric) -> str:
    """The plot as an ``<svg>`` element without a legend; its colours are CSS variables ``--run-0`` ..., ``--line``."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.title}):
        _draw(comparison, plot).savefig(buffer, format="svg", transparent=True, **_SAVED)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", text)
    for index, color in enumerate(LIGHT):
        text = text.replace(color, f"var(--run-{index})")
    return text.replace(_GRID, "var(--line)").replace(_INK, "currentColor")


def png(comparison: Comparison, plot: Metric, path: Path) -> None:
    """Write the plot to a file, with a legend, on white."""
    figure = _draw(comparison, plot)
    for text in figure.legend(loc="upper left", bbox_to_anchor=(0.1, 0.02), fontsize=8, frameon=False).get_texts():
        text.set_parse_math(False)
    figure.savefig(path, format="png", dpi=110, facecolor="white", **_SAVED)


def _draw(comparison: Comparison, plot: Metric) -> Any:
    """The figure of a plot, without a legend. Curves that include their value table begin after its rollouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 3.1))
    axis = figure.subplots()
    for index, (group, found) in enumerate(zip(comparison.groups, lines(comparison, plot), strict=True)):
        if found is None:
            continue
        x = found.x + (table_price(group) if plot.x == TABLE else 0.0)
        if plot.x in ("num_rollout_tokens", "seconds", "step"):
            scale = 60 if plot.x == "seconds" else 1
            x = np.mean([run.spent(plot.x, x) for run in group.runs], axis=0) / scale
        _line(axis, x, found, index, label=group.label)
    _dress(axis, plot)
    figure.tight_layout()
    return figure


def marker(index: int) -> int:
    """Index of a group's marker. Groups with the same colour have different markers."""
    return (index + index // len(MARKERS)) % len(MARKERS)


def _line(axis: Any, x: np.ndarray, found: Curve, index: int, label: str) -> None:
    color = LIGHT[index % len(LIGHT)]
    line = _LINES[index // len(LIGHT) % len(_LINES)]
    every = max(1, len(x) // 6)
    style = {"color": color, "linestyle": line, "marker": [*MARKERS][marker(index)], "label": label}
    axis.plot(x, found.mean, linewidth=1.8, markersize=5, markevery=(index % every, every), **style)
    if found.y.shape[0] > 1:
        low = np.fmin.reduce(found.y, axis=0)
        high = np.fmax.reduce(found.y, axis=0)
        axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _dress(axis: Any, plot: Metric) -> None:
    from matplotlib import ticker

    axis.set_title(plot.title, fontsize=11, loc="left", parse_math=False)
    axis.set_xlabel(_AXES[plot.x] + " (min)" * (plot.x == "seconds"))
    axis.grid(color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(5))
    if "rollout" in _AXES[plot.x]:
        axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axis.set_xlim(left=0)
    if plot.log and axis.dataLim.y0 > 0:
        axis.set_yscale("log")
    elif plot.percent:
        axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))


def plot_training(log: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Plot what was logged of reward, evaluations, the baseline's error and beta, and the staleness and waiting of
    streamed rollouts; no file without any."""
    from matplotlib.figure import Figure

    frame = pd.DataFrame(log)
    keys = compare.evaluations({*frame})
    evaluated = [Metric(f"evaluation: {evaluation_name(key) or 'reward'}", key) for key in keys]
    metrics = [Metric("mean reward", "reward"), *evaluated, *(metric for metric in METRICS if metric.key in _OF_A_RUN)]
    metrics.append(_WAITING)
    shown = [metric for metric in metrics if metric.key in frame and frame[metric.key].notna().any()]
    # A run of fewer steps than logging_steps has logged nothing.
    if not shown:
        return
    figure = Figure(figsize=(7, 2.4 * len(shown)))
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axis, metric in zip(axes, shown, strict=True):
        sides = dict(zip(WAITED, ("trainer", "server"), strict=True)) if metric is _WAITING else {metric.key: None}
        for color, (key, side) in zip(LIGHT, sides.items(), strict=False):
            logged = frame.set_index("step")[key].dropna()
            if metric in evaluated:
                axis.plot(logged, color=color, linewidth=2, marker="o", markersize=4)
            else:
                axis.plot(logged, color=color, alpha=0.3, linewidth=1)
                axis.plot(logged.ewm(alpha=0.2).mean(), color=color, linewidth=2, label=side)
        if metric is _WAITING:
            axis.legend(frameon=False)
        _dress(axis, replace(metric, x="step"))
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
