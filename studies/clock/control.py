"""What ends higher, groups or single rollouts, if each is trained at its own best learning rate?

    python -m studies.clock.control --model FOLDER --bf16 [--rows ROW ...] [--tune_only | --rate RATE] [--at_most RUNS]

The arithmetic task of `studies.clock.study`, with 1,100 problems to train on and 1,000 held out; 40 steps of 64
rollouts; greedy accuracy every eight steps, with ``--bf16`` by weights rounded to it (one core measures 1,000 problems
in half of the time). Not TRL's time but the ends and the rollouts to 40, 45 and 50 % are compared.

- Tuning: each row at learning rates a factor of two apart, from 5e-6 and 1e-5 on towards the better one until the end
  falls, with seeds 10 and 11, which are not counted; of their runs the end alone is measured.
- Counted: the row at that rate with seeds by which nothing was chosen (`COUNTED`).

A run's end is the mean of its last three measurements, and it is at a level where the line between two measurements
crosses it. Runs are stored, so the command can be stopped at any time and called again; those of the stored table are
not made again on another machine either.
Results: ``studies/results/control.json`` and a plot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median, mode
from typing import Any

import numpy as np

from basis_rl.text import markdown_table
from studies.clock.run import ROLLOUTS
from studies.clock.study import LAST, end, planned_run
from studies.drawing import panels, style, title
from studies.runs import RESULTS, Planned, kept, origins, read_table, save_table, study_parser
from studies.training import crossing

TUNING = (10, 11)
STARTS = (5e-6, 1e-5)
# Rows in the order of their runs, with the number of counted seeds.
COUNTED = {
    "grpo": 5,
    "none": 5,
    "least variance, frontier": 5,
    "none, groups of 8": 3,
    "least variance": 3,
    "batch_mean": 3,
    "grpo, groups of 2": 3,
    "grpo, groups of 4": 3,
}
LEVELS = (0.40, 0.45, 0.50)
# Rows of the plot.
SHOWN = {
    "least variance, frontier": "one rollout, basis_history, frontier",
    "none": "one rollout, no baseline",
    "none, groups of 8": "groups of eight, no baseline",
    "grpo": "groups of eight, grpo",
}
RESAMPLED = 2_000
SIZES = ("steps", "held_out", "problems")


class Enough(Exception):
    """`--at_most` runs were made."""


class Runs:
    """The runs of the stored table and of the output folder; a missing one is made, as long as fewer than `at_most`
    were."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.made = options, 0
        self.files: list[Path] = []
        self.found: list[dict[str, Any]] = []
        table = options.results / "control.json"
        self.facts, self.stored = read_table(table) if table.is_file() else ({}, [])
        if any(self.facts.get(key, getattr(options, key)) != getattr(options, key) for key in SIZES):
            raise SystemExit(f"{table} has runs of other sizes. Give another --results, or remove it.")

    def plan(self, row: str, seed: int, rate: float) -> Planned:
        # Of a run that only chooses the rate, nothing but the end is read.
        start = self.options.steps - (LAST - 1) * self.options.every if seed in TUNING else 0
        return planned_run(self.options, row, seed, rate, start, rounded=self.options.bf16)

    def get(self, row: str, seed: int, rate: float) -> dict[str, Any]:
        """The run, with its labels.

        Raises:
            Enough: it is not there, and no more are made.
        """
        plan = self.plan(row, seed, rate)
        if not plan.file.is_file():
            for other in self.stored:
                if all(other[name] == value for name, value in plan.labels.items()):
                    self.found += [other] if other not in self.found else []
                    return other
            if self.made == self.options.at_most:
                raise Enough
            self._begin_measured(plan)
        found, fresh = kept(plan.file, plan.settings, plan.make)
        self.made += fresh
        run: dict[str, Any] = {**plan.labels, **found}
        if plan.file not in self.files:
            self.files.append(plan.file)
            self.found.append(run)
        return run

    def _begin_measured(self, plan: Planned) -> None:
        """All runs begin with one model: what another measured of it is not measured again."""
        others = sorted(self.options.output.glob("*/points.json"))
        points = plan.file.with_suffix("") / "points.json"
        if others and not points.is_file():
            points.parent.mkdir(parents=True, exist_ok=True)
            points.write_text(json.dumps(json.loads(others[0].read_text())[:1]))


def ends_of(runs: Runs, row: str, rate: float, least: float = 0.0) -> list[float]:
    """The ends of a row at a rate with the seeds of `TUNING`; of the first alone where that is below `least`."""
    found: list[float] = []
    for seed in TUNING:
        found.append(end(runs.get(row, seed, rate)))
        if found[-1] < least:
            break
    return found


def tuned(runs: Runs, row: str) -> float:
    """The best rate of a row: from the better of `STARTS` on, in steps of two, until the end falls.

    A further rate is given up after one seed if that ends below both seeds of the best rate.
    """
    low, high = STARTS
    ends = {rate: ends_of(runs, row, rate) for rate in STARTS}
    factor = 0.5 if fmean(ends[low]) > fmean(ends[high]) else 2.0
    best = low if factor < 1 else high
    while True:
        following = best * factor
        ends[following] = ends_of(runs, row, following, min(ends[best]))
        if fmean(ends[following]) <= fmean(ends[best]):
            return best
        best = following


def interval(values: list[float]) -> tuple[float, float]:
    """A 90 % interval of the mean, by drawing the seeds again."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLED, len(values))).mean(1)
    return float(np.quantile(drawn, 0.05)), float(np.quantile(drawn, 0.95))


def lines(runs: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """A line of the report for each row, rate and purpose (tuning or counted)."""
    groups: dict[tuple[str, float, bool], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["row"], run["learning_rate"], run["seed"] in TUNING), []).append(run)
    for (row, rate, is_tuning), group in groups.items():
        ends = [end(run) for run in group]
        low, high = interval(ends)
        seeds = ", ".join(str(run["seed"]) for run in group)
        found = [row, f"{rate:g}", f"{seeds} (not counted)" if is_tuning else seeds]
        found.append(f"{fmean(ends):.1%} ({low:.1%} to {high:.1%})")
        if is_tuning:
            yield [*found, *[""] * (len(LEVELS) + 1)]
            continue
        for level in LEVELS:
            reached = [crossing(run["step"], run["accuracy"], level) for run in group]
            there = [each for each in reached if each is not None]
            found.append(
                f"{ROLLOUTS * median(there):.0f}" if len(there) == len(reached) else f"{len(there)} of {len(reached)}"
            )
        yield [*found, f"{fmean(run['cpu'][-1] / run['step'][-1] for run in group):.1f}"]


def table(runs: list[dict[str, Any]]) -> str:
    head = ["row", "learning rate", "seeds", "at the end (90 % of the mean)"]
    head += [f"rollouts to {level:.0%}" for level in LEVELS]
    return markdown_table(list(lines(runs)), [*head, "seconds a step"])


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over rollouts of the counted runs: the median over the seeds of a row, and a band of all of them."""
    with panels(path, 1, 1, width=6.6, height=4.0) as (axis,):
        for index, row in enumerate(SHOWN):
            counted = [run for run in runs if run["row"] == row and run["seed"] not in TUNING]
            if counted:
                # Some may be at another rate than the row's (`--rate`).
                rate = mode(run["learning_rate"] for run in counted)
                group = [run for run in counted if run["learning_rate"] == rate]
                accuracies = 100 * np.array([run["accuracy"] for run in group])
                rollouts = ROLLOUTS * np.array(group[0]["step"])
                label = f"{SHOWN[row]} ({rate:g})"
                axis.plot(rollouts, np.median(accuracies, axis=0), label=label, **style(index))
                axis.fill_between(
                    rollouts, accuracies.min(axis=0), accuracies.max(axis=0), color=style(index)["color"], alpha=0.15
                )
        title(axis, "", "rollouts", "greedy accuracy on held-out problems, %")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, loc="lower right")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = study_parser(__doc__, "control")
    parser.add_argument("--model", default="runs/smollm2/model", help="folder with SmolLM2-135M-Instruct")
    parser.add_argument("--rows", nargs="+", choices=list(COUNTED), default=list(COUNTED))
    parser.add_argument("--tune_only", action="store_true", help="no counted seeds")
    parser.add_argument("--rate", type=float, help="count at this rate, without the search for the best one")
    parser.add_argument("--at_most", type=int, default=10**6, help="runs of this call")
    parser.add_argument("--bf16", action="store_true", help="for processors that have it")
    parser.set_defaults(task="arithmetic", steps=40, every=8, micro_batch=64, problems=1_100, held_out=1_000, threads=1)
    parser.set_defaults(data=Path("."))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Make and report the runs; returns them."""
    options = parse(argv)
    options.output = options.output or Path("runs/control")
    options.results = options.results or (options.output if options.quick else RESULTS)
    if options.quick:
        options.steps, options.every, options.problems, options.held_out = 4, 1, 100, 10
    runs = Runs(options)
    try:
        rates = {row: options.rate or tuned(runs, row) for row in options.rows}
        # Seed by seed, so that the rows can be compared wherever it stops.
        for seed in range(0 if options.tune_only else max(COUNTED.values())):
            for row, rate in rates.items():
                if seed < COUNTED[row]:
                    runs.get(row, seed, rate)
    except Enough:
        print(f"{runs.made} runs were made. The same command goes on.")
    known = {(run["row"], run["learning_rate"], run["seed"]) for run in runs.found}
    runs.found += [run for run in runs.stored if (run["row"], run["learning_rate"], run["seed"]) not in known]
    made = runs.facts.get("runs made", [])
    facts = {"runs made": made + [each for each in origins(runs.files) if each not in made]}
    facts |= {key: getattr(options, key) for key in SIZES}
    save_table("control", facts, runs.found, options.results)
    print(table(runs.found))
    if any(run["seed"] not in TUNING for run in runs.found):
        draw(runs.found, options.results / "control.png")
    return runs.found


if __name__ == "__main__":
    main()
