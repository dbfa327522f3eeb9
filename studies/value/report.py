"""Summaries, printed output and plots of the value study, as functions of its results by seed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from basis_rl.functional.tilt import beta_grid
from studies import drawing

STAGES = ("early", "middle", "late")
EDGES = (0.206, 0.226, 0.246, 0.266, 0.287, 0.307)  # the paper's bins of a batch's standard deviation of V


def shortened(results: dict[str, Any]) -> dict[str, Any]:
    """The results with means and standard errors in place of the numbers of many batches."""
    stages = {}
    for stage, found in results["stages"].items():
        short = {
            key: {"batches": len(found[key]["spread"]), "estimators": short_rows(found[key]["estimators"])}
            for key in ("natural", "natural, many", "spread 0.26")
        }
        stages[stage] = {**found, **short}
    return {**results, "stages": stages}


def short_rows(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of the estimators with `mean_and_error` in place of the numbers of many batches."""
    return {
        name: {**row, **{key: mean_and_error(row[key]) for key in ("mse", "at_bounds", "explained")}}
        for name, row in rows.items()
    }


def mean_and_error(numbers: Sequence[float]) -> list[float]:
    """Mean and standard error of the numbers that are not NaN; NaN if there are too few."""
    known = [number for number in numbers if number == number]
    center = float(np.mean(known)) if known else float("nan")
    return [center, float(np.std(known, ddof=1) / len(known) ** 0.5) if len(known) > 1 else float("nan")]


def show(results: dict[str, Any]) -> None:
    """Print the errors of every estimator for one seed."""
    for stage, row in results["age of the table"].items():
        print(f"{stage}: MSE of basis by the table's policy: " + ", ".join(f"{k} {v:.4f}" for k, v in row.items()))
    for stage, found in results["stages"].items():
        print(f"\n{stage}: mean V {found['mean V']:.3f}, spread {found['spread of V']:.3f}, drift {found['drift']}, "
              f"oracle error {found['error of the oracle']:.4f}; MSE, 0/1 share")  # fmt: skip
        for name in found["natural"]["estimators"]:
            cells = [found[key]["estimators"][name] for key in ("natural", "natural, many", "spread 0.26")]
            text = "   ".join(f"{np.mean(c['mse']):.4f} {np.mean(c['at_bounds']):4.0%}" for c in cells)
            bins = " ".join(f"{x:.4f}" for x in found["by spread"]["mse"][name])
            print(f"  {name:28} {text}   {bins}")
        chosen = sorted(results["beta"][stage]["chosen"])
        print(f"  beta: best {results['beta'][stage]['best']}, chosen (median) {chosen[len(chosen) // 2]:.2f}")


CURVES = ("initial", "refined")
DRAWN = (
    "basis unb", "basis_history", "batch mean", "group mean 8", "rloo 8", "bv_blend 8", "group mean 4", "group mean 2",
    "group mean 1", "basis unb, no smoothing",
)  # fmt: skip


def averaged(found: Sequence[Any]) -> Any:
    """The seeds' results as one: means of numbers (without NaN); anything else is taken from the first seed."""
    first = found[0]
    if isinstance(first, dict):
        return {key: averaged([each[key] for each in found]) for key in first}
    if isinstance(first, (list, tuple)):
        return [averaged(each) for each in zip(*found, strict=True)]
    if isinstance(first, (int, float)):
        known = [each for each in found if each == each]
        return sum(known) / len(known) if known else float("nan")
    return first


def errors(result: dict[str, Any], stage: str) -> dict[str, float]:
    """The error of each estimator, over many batches drawn uniformly from the pool."""
    rows = result["stages"][stage]["natural, many"]["estimators"]
    return {name: float(np.mean(row["mse"])) for name, row in rows.items()}


def share(error: float, of: float) -> float:
    """``error / of``; NaN if `of` is 0."""
    return error / of if of else float("nan")


def summary(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """For each stage and seed, the MSE of each estimator, also as a share of the batch mean's."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for stage in STAGES:
        by_seed = [errors(result, stage) for result in results]
        found[stage] = {
            name: {
                "mse": [row[name] for row in by_seed],
                "share": [share(row[name], row["batch mean"]) for row in by_seed],
            }
            for name in by_seed[0]
        }
    return found


AGED = ("basis unb", "basis_history", "bv_blend 8", "group mean 4", "group mean 8")


def plot(results: Sequence[dict[str, Any]], folder: Path, name: str, stage: str = "middle") -> None:
    """Plot Fig. 3 of the paper for the middle checkpoint: means over the seeds; in (a) each seed is a dot."""
    found = averaged([result["stages"][stage] for result in results])
    labels = ["0–0.2", "0.2–0.4", "0.4–0.6", "0.6–0.8", "0.8–1"]
    natural, by_seed = found["natural, many"]["estimators"], [errors(result, stage) for result in results]
    with drawing.panels(folder / f"{name}.png", 2, 2, width=5.2, height=3.7) as (a, b, c, d):
        drawing.title(a, f"(a) error of the baseline, {stage} checkpoint", "MSE to the true value", "")
        order = sorted((*DRAWN, "rloo 2", "rloo 4", "bv_blend 1"), key=lambda key: mean(row[key] for row in by_seed))
        heights = [mean(row[key] for row in by_seed) for key in order]
        colors = [drawing.LIGHT[0 if key.startswith("basis") else 6] for key in order]
        a.barh(range(len(order)), heights, color=colors)
        a.set_yticks(range(len(order)), order, fontsize=8)
        for row, (key, height) in enumerate(zip(order, heights, strict=True)):
            seeds = [each[key] for each in by_seed]
            a.plot(seeds, [row] * len(seeds), "k.", markersize=3)
            a.text(max(seeds), row, f"  {height:.3f}", va="center", fontsize=7.5)
        middles = [(low + high) / 2 for low, high in itertools.pairwise(EDGES)]
        drawing.title(b, "(b) MSE by the spread of V in the batch", "standard deviation of V", "MSE")
        drawing.title(c, "(c) MSE by the prompt's value", "V", "MSE")
        drawing.title(d, "(d) baseline exactly 0 or 1", "V", "share")
        for index, key in enumerate(DRAWN):
            look = drawing.style(index)
            b.plot(middles, found["by spread"]["mse"][key], label=key, **look)
            c.plot(labels, natural[key]["mse_by_band"], label=key, **look)
            d.plot(labels, natural[key]["at_bounds_by_band"], label=key, **look)
        drawing.log_scale(b)
        drawing.log_scale(c)
        drawing.beside(b)


def plot_beta(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot Fig. 2 of the paper: the error over beta at each checkpoint, and the betas that were chosen."""
    with drawing.panels(path, 1, 3, width=4.2) as axes:
        for axis, stage in zip(axes, STAGES, strict=True):
            curves = averaged([{key: result["beta"][stage][key] for key in CURVES} for result in results])
            value = mean(result["stages"][stage]["mean V"] for result in results)
            drawing.title(axis, f"{stage}: mean V {value:.2f}", "β", "MSE" if stage == "early" else "")
            for index, key in enumerate(CURVES):
                axis.plot(beta_grid(), curves[key], label=key, color=drawing.LIGHT[index], linewidth=1.8)
            betas = np.concatenate([result["beta"][stage]["chosen"] for result in results])
            low, chosen, high = np.quantile(betas, [0.1, 0.5, 0.9])
            axis.axvspan(low, high, color="#999999", alpha=0.2, linewidth=0, label="chosen, 10 to 90 %")
            axis.axvline(chosen, color="#444444", linestyle="--", linewidth=1.2, label="chosen, median")
            axis.set_xscale("log")
            axis.set_ylim(bottom=0)
        drawing.beside(axes[-1])


def plot_age(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the errors at each checkpoint over how far the policy has moved since the table was made.

    Errors are shares of the batch mean's; the line is the mean over seeds, the band goes from smallest to largest.
    ``new table`` has a table of the checkpoint's own policy.
    """
    shares = summary(results)
    moved = [mean(result["stages"][stage]["drift"]["shift"] for result in results) for stage in STAGES]
    curves = {name: list(zip(*(shares[stage][name]["share"] for stage in STAGES), strict=True)) for name in AGED}
    tables = [result["age of the table"] for result in results]
    curves["basis unb, new table"] = [
        tuple(share(row[stage][stage], row[stage]["none"]) for stage in STAGES) for row in tables
    ]
    with drawing.panels(path, 1, 1, width=6.4, height=3.8) as (axis,):
        drawing.title(axis, "", "logits that the policy has moved since the table", "MSE, share of the batch mean's")
        for index, (name, lines) in enumerate(curves.items()):
            drawing.band(axis, moved, lines, index, name)
        axis.set_ylim(bottom=0)
        drawing.beside(axis)
