"""Evaluates the runs of `studies.selection.study`: pure functions of their measurements, and the plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from studies import drawing
from studies.policy.report import collapsed, spent_until, spread
from studies.training import levels

REFERENCE = "grpo G=8"  # with prompts drawn uniformly
SHARES = (0.5, 0.75, 0.9, 1.0)  # of the final level of the reference
DECIDING = 1.0  # the share that decides which rate suits a row best: that of the question
HELD = 2  # measurements that a level is the mean of
DRAWN = 8  # maximum number of rows in the plot; those whose runs were made first

Run = dict[str, Any]


def level_of(run: Run, judged: str) -> list[float]:
    """Held-out accuracy on the family `judged`, as `levels` of `HELD` measurements."""
    return levels(run["scores"][judged], HELD)


def reached(run: Run, judged: str, level: float) -> float | None:
    """Rollouts until the accuracy on `judged`, as a level, reaches `level`; None if it never does."""
    return spent_until(run["rollouts"], run["scores"][judged], level, HELD)


def by_rate(runs: Sequence[Run], row: str, sampler: str) -> dict[float, list[Run]]:
    """The runs of a row with a sampler, by learning rate."""
    own = [run for run in runs if (run["row"], run["sampler"]) == (row, sampler)]
    return {
        rate: [run for run in own if run["learning_rate"] == rate] for rate in sorted({r["learning_rate"] for r in own})
    }


def reference_level(runs: Sequence[Run], judged: str) -> float | None:
    """The final level of `REFERENCE` with uniform prompts, a median over seeds, at the rate where it is highest.

    None if there are no such runs.
    """
    finals = [median(level_of(run, judged)[-1] for run in own) for own in by_rate(runs, REFERENCE, "uniform").values()]
    return max(finals, default=None)


def best_rate(rates: dict[float, list[Run]], judged: str, level: float) -> float:
    """The learning rate that suits a row best: the one at which its median run reaches `level` with fewest rollouts.

    Among rates at which the median run never does, it is the one with the highest median final level.
    """

    def goodness(rate: float) -> tuple[float, float]:
        spent = median(_never(reached(run, judged, level)) for run in rates[rate])
        return -spent, median(level_of(run, judged)[-1] for run in rates[rate])

    return max(rates, key=goodness)


def _never(spent: float | None) -> float:
    return math.inf if spent is None else spent


def _told(values: Sequence[float]) -> dict[str, float | None]:
    """`spread`, with None for infinite values, which JSON does not have."""
    return {key: value if math.isfinite(value) else None for key, value in spread(values).items()}


def line_of(runs: Sequence[Run], judged: str, targets: dict[str, float]) -> dict[str, Any]:
    """The results of the runs of one row, sampler and rate, over their seeds; see `summary`."""
    line: dict[str, Any] = {
        "seeds": [run["seed"] for run in runs],
        "rollouts": spread([run["rollouts"][-1] for run in runs]),
        "final": {name: spread([levels(run["scores"][name], HELD)[-1] for run in runs]) for name in runs[0]["scores"]},
        "collapsed": sum(collapsed(run["scores"][judged], last=HELD) for run in runs),
        "entropy": spread([run["entropy"] for run in runs]),
        "cpu": spread([run["cpu"] for run in runs]),
        "to": {},
    }
    for name, level in targets.items():
        spent = [_never(reached(run, judged, level)) for run in runs]
        line["to"][name] = {**_told(spent), "never": sum(map(math.isinf, spent)), "seeds": [*map(_finite, spent)]}
    total = sum(runs[0]["drawn"].values()) or 1
    line["drawn"] = {family: count / total for family, count in runs[0]["drawn"].items()}
    return line


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def summary(runs: Sequence[Run], judged: str) -> list[dict[str, Any]]:
    """A line for each row, sampler and learning rate, over its seeds.

    ``final`` is each held-out score at the end. ``to`` is, for each share of `SHARES`, the number of rollouts until
    the accuracy on `judged` reaches this share of `reference_level`: the median, minimum and maximum over the seeds
    (None if infinite), how many seeds never reach it, and the number for each seed. ``best`` says whether this rate
    suits the row best (`best_rate` at the share `DECIDING`). ``drawn`` is the share of each family among the rollouts
    of the first seed. Without runs of the reference there are no
    levels, and the best rate is the one with the highest final level.
    """
    final = reference_level(runs, judged)
    targets = {} if final is None else {f"{share:g}": share * final for share in SHARES}
    lines = []
    for row, sampler in dict.fromkeys((run["row"], run["sampler"]) for run in runs):
        rates = by_rate(runs, row, sampler)
        best = best_rate(rates, judged, targets.get(f"{DECIDING:g}", math.inf))
        for rate, own in rates.items():
            labels = {"row": row, "sampler": sampler, "learning_rate": rate, "best": rate == best}
            lines.append({**labels, **line_of(own, judged, targets)})
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The `summary` in Markdown, with a row's best rate in bold, and rollouts in thousands: median and each seed."""
    if not lines:
        return "no runs yet"
    names, shares = [*lines[0]["final"]], [*lines[0]["to"]]
    titles = ["row", "sampler", "rate", *names, "entropy", *(f"to {float(share):.0%}" for share in shares)]
    text = [_cells(titles), _cells(["---"] * len(titles))]
    for line in lines:
        rate = f"{line['learning_rate']:g}"
        cells = [f"`{line['row']}`", f"`{line['sampler']}`", f"**{rate}**" if line["best"] else rate]
        cells += [f"{line['final'][name]['median']:.0%}" for name in names]
        cells += [f"{line['entropy']['median']:.2f}", *(_range(line["to"][share]) for share in shares)]
        text.append(_cells(cells))
    return "\n".join(text)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _range(to: dict[str, Any]) -> str:
    """Rollouts in thousands: the median, and the number for each seed."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value / 1000:.1f}"

    return f"{shown(to['median'])} ({' '.join(map(shown, to['seeds']))})"


def draw(runs: Sequence[Run], lines: Sequence[dict[str, Any]], judged: str, samples: int, path: Path) -> None:
    """Plot the first `DRAWN` rows: accuracy and pass@`samples` on `judged` at their best rate, and the end by rate, if
    there are several.

    Lines are means over the seeds, bands their range.
    """
    if not runs:
        return
    best = dict([((line["row"], line["sampler"]), line["learning_rate"]) for line in lines if line["best"]][:DRAWN])
    shown = {f"accuracy, {judged} prompts": judged, f"pass@{samples}, {judged} prompts": f"pass@{samples} {judged}"}
    has_rates = any(len(by_rate(runs, *pair)) > 1 for pair in best)
    with drawing.panels(path, 1, 2 + has_rates, width=4.4, height=3.2) as axes:
        for axis, (title, score) in zip(axes, shown.items(), strict=False):
            drawing.title(axis, title, "rollouts", "")
            drawing.thousands(axis)
            for index, (pair, rate) in enumerate(best.items()):
                curves = [(run["rollouts"], run["scores"][score]) for run in by_rate(runs, *pair)[rate]]
                drawing.curves(axis, curves, index, " + ".join(pair))
            drawing.percent(axis)
        if has_rates:
            _draw_rates(axes[2], runs, [*best], judged)
        drawing.beside(axes[-1], axes[0])


def _draw_rates(axis: Any, runs: Sequence[Run], rows: Sequence[tuple[str, str]], judged: str) -> None:
    """Plot the final level over the learning rate."""
    drawing.title(axis, f"final accuracy, {judged} prompts, by rate", "learning rate", "")
    for index, pair in enumerate(rows):
        rates = by_rate(runs, *pair)
        finals = [[level_of(run, judged)[-1] for run in own] for own in rates.values()]
        if len(finals) > 1 and len({*map(len, finals)}) == 1:
            drawing.band(axis, [*rates], list(zip(*finals, strict=True)), index, " + ".join(pair))
    axis.set_xscale("log")
    axis.set_xticks(sorted({run["learning_rate"] for run in runs}))
    axis.set_xticklabels([f"{rate:g}" for rate in sorted({run["learning_rate"] for run in runs})])
    axis.minorticks_off()
    drawing.percent(axis)
