"""Shares of the batch mean's error, and a plot, as functions of the value study's table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from studies import drawing

STAGES = ("early", "middle", "late")
AGED = ("basis unb", "basis_history", "bv_blend 8", "group mean 4", "group mean 8")  # rows of the plot


def shares(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """For each stage the error of each estimator by seed, as a share of the batch mean's."""
    mse = {(row["stage"], row["seed"], row["estimator"]): row["mse"] for row in rows}
    found: dict[str, dict[str, list[float]]] = {stage: {} for stage in STAGES}
    for (stage, seed, name), error in mse.items():
        found[stage].setdefault(name, []).append(share(error, mse[stage, seed, "batch mean"]))
    return found


def share(error: float, of: float) -> float:
    """``error / of``; NaN if `of` is 0."""
    return error / of if of else float("nan")


def table(rows: Sequence[dict[str, Any]], checkpoints: Sequence[dict[str, Any]]) -> str:
    """The shares in Markdown, mean and range over the seeds; and how far prompts have moved at each checkpoint."""
    found = shares(rows)
    text = [f"| | {' | '.join(STAGES)} |", "|---|---|---|---|"]
    for name in found[STAGES[0]]:
        by_stage = [found[stage][name] for stage in STAGES]
        cells = [f"{mean(seeds):.2f} ({min(seeds):.2f} to {max(seeds):.2f})" for seeds in by_stage]
        text.append(f"| {name} | {' | '.join(cells)} |")
    for each in checkpoints:
        facts = ", ".join(f"{key} {each[key]:.3f}" for key in ("mean V", "shift", "spread", "correlation"))
        text.append(f"seed {each['seed']}, {each['stage']}: {facts}; basis by its table's policy: {each['by table']}")
    return "\n".join(text)


def plot(rows: Sequence[dict[str, Any]], checkpoints: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the errors at each checkpoint over how far the policy has moved since the table was made.

    Errors are shares of the batch mean's; the line is the mean over seeds, the band goes from smallest to largest.
    ``new table`` has a table of the checkpoint's own policy.
    """
    found = shares(rows)
    by_stage = {stage: [each for each in checkpoints if each["stage"] == stage] for stage in STAGES}
    moved = [mean(each["shift"] for each in by_stage[stage]) for stage in STAGES]
    curves = {name: [found[stage][name] for stage in STAGES] for name in AGED}
    curves["basis unb, new table"] = [
        [share(each["by table"][stage], each["by table"]["none"]) for each in by_stage[stage]] for stage in STAGES
    ]
    with drawing.panels(path, 1, 1, width=6.4, height=3.8) as (axis,):
        drawing.title(axis, "", "logits that the policy has moved since the table", "MSE, share of the batch mean's")
        for index, (name, stages) in enumerate(curves.items()):
            drawing.band(axis, moved, list(zip(*stages, strict=True)), index, name)
        axis.set_ylim(bottom=0)
        drawing.beside(axis)
