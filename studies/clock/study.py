"""How many minutes does a real language model need, by TRL's trainer and by ours, on the same machine?

    python -m studies.clock.study --model FOLDER [--task TASK] [--rows ROW ...] [--seeds 0 1 2] [--add] [--report]

SmolLM2-135M-Instruct (`python -m examples.smollm2.model FOLDER`) learns a mix of problems. All rows have the same
number type, threads, backend of generation, 64 rollouts a step, reward, objective (``dapo``), learning rate with its
warm-up, and problems; greedy accuracy on held-out problems is measured outside of the clock.

- Level: the mean of TRL's last three measurements after ``--steps`` steps, at the better of its learning rates.
- Crossing: the first time at which the mean of three measurements in a row is at the level, by TRL's trainer too.
- Time is processor time. With one thread that is wall time, as long as nothing else wants the core.

Each run is a process of its own, one after another, and is stored in ``runs/clock_study`` with checkpoints, so the
command can be stopped and called again; a run's clock goes on where its checkpoint is. Results: the tables
``studies/results/clock_study*.json`` and a plot. The study takes many hours, so with ``--add`` a call adds its runs to
the stored table, which says for each run when and where it was made. ``--report`` shows the stored table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

from basis_rl.text import markdown_table
from studies.clock.run import ROLLOUTS, ROWS
from studies.clock.tasks import TASKS
from studies.drawing import save
from studies.runs import RESULTS, Planned, kept_runs, placed, read_table, save_table, study_parser

FIRST = ("TRL", "TRL, head fixed", "grpo", "basis_history, frontier", "none")
LAST = 3
# What tells two runs of a table apart.
LABELS = ("row", "seed", "learning_rate", "micro_batch")


def crossing(points: list[float], accuracy: list[float], level: float) -> float | None:
    """The first of `points` at which the mean of the last `LAST` measurements is at `level`; None if there is none."""
    for end in range(LAST, len(accuracy) + 1):
        # Equal counts of right answers may differ in the last bit of their means.
        if fmean(accuracy[end - LAST : end]) >= level - 1e-9:
            return points[end - 1]
    return None


def end(run: dict[str, Any]) -> float:
    """The mean of a run's last measurements."""
    return fmean(run["accuracy"][-LAST:])


def best(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the runs with one row and seed, that with the highest end: each row at the better of its learning rates."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for run in runs:
        key = run["row"], run["seed"]
        if key not in found or end(run) > end(found[key]):
            found[key] = run
    return list(found.values())


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each run: its last level, and at which share of TRL's minutes and rollouts it crosses TRL's level."""
    found = []
    for run in runs:
        theirs = next((other for other in best(runs) if (other["row"], other["seed"]) == ("TRL", run["seed"])), None)
        level = end(theirs) if theirs else None
        line = {name: run[name] for name in ("row", "learning_rate", "seed")} | {"end": end(run)}
        line["seconds a step"] = run["cpu"][-1] / run["step"][-1]
        for unit in ("cpu", "step"):
            own = crossing(run[unit], run["accuracy"], level) if level is not None else None
            others = crossing(theirs[unit], theirs["accuracy"], level) if theirs and level is not None else None
            line[unit] = own / others if own is not None and others else None
        found.append(line)
    return found


def table(runs: list[dict[str, Any]]) -> str:
    """The summary as Markdown."""
    head = [
        "row",
        "learning rate",
        "seed",
        "accuracy at the end",
        "seconds a step",
        "minutes to TRL's level / TRL's",
        "rollouts to it / TRL's",
    ]

    def share(value: float | None) -> str:
        return "not reached" if value is None else f"{value:.2f}"

    lines = [
        [
            line["row"],
            f"{line['learning_rate']:g}",
            line["seed"],
            f"{line['end']:.1%}",
            f"{line['seconds a step']:.1f}",
        ]
        + [share(line[unit]) for unit in ("cpu", "step")]
        for line in summary(runs)
    ]
    return markdown_table(lines, head)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over minutes: a colour for each row, a line for each seed, at the row's better learning rate.

    More rows than those of `FIRST` could not be told apart, so the others are in the table alone.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2))
    runs = best([run for run in runs if run["row"] in FIRST] or runs)
    for number, row in enumerate(dict.fromkeys(run["row"] for run in runs)):
        for index, run in enumerate(each for each in runs if each["row"] == row):
            minutes = [seconds / 60 for seconds in run["cpu"]]
            name = row if row.startswith("TRL") else f"ours: {row}"
            axes.plot(minutes, run["accuracy"], color=f"C{number}", label=None if index else name, marker=".")
    axes.set(xlabel="minutes of training (processor time)", ylabel="greedy accuracy, held-out problems", ylim=(0, None))
    axes.set_title("SmolLM2, 135M parameters, one CPU core")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    save(figure, path)


def run(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One training, in a process of its own; its points as columns.

    Raises:
        SystemExit: it was stopped; the next call goes on at its last checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "plan.json"
    file.write_text(json.dumps({**plan, "folder": str(folder)}))
    code = subprocess.run([sys.executable, "-m", "studies.clock.run", str(file)], check=False).returncode
    if code:
        raise SystemExit(f"The run in {folder} ended with exit code {code}. The same command goes on with it.")
    points = json.loads((folder / "points.json").read_text())
    logs = json.loads((folder / "logs.json").read_text())
    columns: dict[str, Any] = {name: [point[name] for point in points] for name in ("step", "wall", "cpu")}
    columns |= {"accuracy": [point["accuracy"]["all"] for point in points]}
    table = folder / "table_cost.json"
    columns |= {"table": json.loads(table.read_text()) if table.is_file() else None}
    kinds = [{k: v for k, v in point["accuracy"].items() if k != "all"} for point in points]
    return columns | {"kinds": kinds[-1]} | {name: fmean(logs[name]) for name in ("rewards", "lengths")}


def planned_run(
    options: argparse.Namespace, row: str, seed: int, learning_rate: float, measured_from: int = 0, **more: Any
) -> Planned:
    """One run: the sizes of `options`, and `more` for its plan (`studies.clock.run`).

    A run of which only the steps from `measured_from` on are measured is no other run.
    """
    settings = {
        "seed": seed, "max_steps": options.steps, "learning_rate": learning_rate,
        "bf16": options.bf16, "per_device_train_batch_size": options.micro_batch, "save_steps": options.every,
        "gradient_accumulation_steps": ROLLOUTS // options.micro_batch,
    }  # fmt: skip
    plan = {
        "row": row, "task": options.task, "model": options.model, "data": str(options.data.resolve()),
        "problems": options.problems, "held_out": options.held_out, "every": options.every,
        "threads": options.threads, "settings": settings, **more,
    }  # fmt: skip
    name = f"{options.task}-{row.replace(', ', '-').replace(' ', '-')}-{learning_rate:g}-seed{seed}"
    name += f"-{options.micro_batch}"
    folder = options.output / name
    labels = {"task": options.task, "row": row, "seed": seed, "learning_rate": learning_rate}
    labels |= {key: getattr(options, key) for key in ("micro_batch", "threads", "bf16")}
    make = partial(run, {**plan, "measured_from": measured_from}, folder)
    return Planned(labels, options.output / f"{name}.json", plan, make)


def planned(options: argparse.Namespace) -> list[Planned]:
    """The runs in their order: all rows of a seed, then those of the next."""
    return [planned_run(options, row, seed, options.learning_rate) for seed in options.seeds for row in options.rows]


def added(
    old_facts: dict[str, Any], old: list[dict[str, Any]], facts: dict[str, Any], runs: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The stored table with the runs of this call, which take the place of equal ones.

    Raises:
        SystemExit: the table has runs of other sizes.
    """
    for key in ("steps", "held_out", "problems"):
        if old_facts[key] != facts[key]:
            raise SystemExit(f"--{key} is {facts[key]}, but the stored table has runs of {old_facts[key]}.")
    made = [*old_facts["runs made"], *(each for each in facts["runs made"] if each not in old_facts["runs made"])]
    new = {tuple(run[label] for label in LABELS) for run in runs}
    rest = [run for run in old if tuple(run[label] for label in LABELS) not in new]
    order = sorted([*rest, *runs], key=lambda run: (run["seed"], list(ROWS).index(run["row"])))
    return {**facts, "runs made": made}, order


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = study_parser(__doc__, "clock_study")
    parser.add_argument("--model", default="runs/smollm2/model", help="folder with SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of GSM8K's files")
    parser.add_argument("--task", choices=list(TASKS), default="arithmetic")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(FIRST))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--every", type=int, default=8, help="steps between measurements and checkpoints")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--problems", type=int, default=1_400)
    parser.add_argument("--held_out", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="for processors that have it")
    parser.add_argument("--table", default="clock_study", help="name of the table, for runs that choose settings")
    parser.add_argument("--add", action="store_true", help="add the runs to those of the stored table")
    parser.add_argument("--report", action="store_true", help="print and plot the stored table, and train nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the study; returns its runs."""
    options = parse(argv)
    kind = [f"--{name}={getattr(options, name)}" for name in ("task", "model", "data")]
    placed(options, parse([*kind, *(["--report"] if options.report else []), *(["--bf16"] if options.bf16 else [])]))
    if options.add and not options.quick:
        options.results = RESULTS
    name = options.table + ("" if options.task == "arithmetic" else f"_{options.task}")
    if options.quick:
        options.steps, options.every, options.problems, options.held_out, options.seeds = 4, 1, 100, 10, [0]
    if options.report:
        _, runs = read_table(RESULTS / f"{name}.json")
    else:
        runs, facts = kept_runs(planned(options))
        facts |= {key: getattr(options, key) for key in ("steps", "held_out", "problems")}
        file = options.results / f"{name}.json"
        if options.add and file.is_file():
            facts, runs = added(*read_table(file), facts, runs)
        save_table(name, facts, runs, options.results)
    print(table(runs))
    draw(runs, options.results / f"{name}.png")
    return runs


if __name__ == "__main__":
    main()
