"""Does a run without a baseline stop or fall, if it goes on four times as long?

    python -m studies.clock.long --model FOLDER --bf16 [--rows ROW ...] [--seeds 0]

FOLDER has a policy that solves half of the arithmetic problems: ``trainer/checkpoint-40`` of a run of
`studies.clock.control`. Every row goes on from it for 160 steps of 64 rollouts, with the same rate and warm-up. Before
training and every 40 steps: greedy accuracy on 1,000 held-out problems by kind, and ``avg@8`` and ``pass@8`` at
temperature 1 on 200 of them; and the entropy of a rollout's tokens, mean of the ten steps before.

Runs are stored and go on after a stop. Results: ``studies/results/control_long.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from basis_rl.text import markdown_table
from studies.clock import study
from studies.runs import Planned, kept_runs, placed, save_table, study_parser

ROWS = ("none", "least variance, frontier")
SAMPLED = 200
LAST_STEPS = 10


def run(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One training: its measurements, a column each."""
    study.run(plan, folder)
    points = json.loads((folder / "points.json").read_text())
    entropies = json.loads((folder / "logs.json").read_text())["entropies"]
    found: dict[str, Any] = {"step": [point["step"] for point in points]}
    found |= {name: [point["accuracy"][name] for point in points] for name in points[0]["accuracy"]}
    # Of the first steps, for the policy before training.
    found["entropy"] = [fmean(entropies[max(0, step - LAST_STEPS) : max(step, LAST_STEPS)]) for step in found["step"]]
    return found | {"cpu": points[-1]["cpu"]}


def planned(options: argparse.Namespace) -> list[Planned]:
    runs = []
    for seed in options.seeds:
        for row in options.rows:
            each = study.planned_run(
                options, row, seed, options.learning_rate, rounded=options.bf16, sampled=options.sampled
            )
            settings = {**each.settings, "measured_from": 0}
            make = partial(run, settings, each.file.with_suffix(""))
            runs.append(Planned(each.labels, each.file, each.settings, make))
    return runs


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each measurement."""
    names = [name for name in runs[0] if isinstance(runs[0][name], list) and name not in ("step", "entropy")]
    lines = []
    for each in runs:
        for index, step in enumerate(each["step"]):
            shares = [f"{each[name][index]:.1%}" for name in names]
            lines.append([each["row"], each["seed"], step, *shares, f"{each['entropy'][index]:.2f}"])
    return markdown_table(lines, ["row", "seed", "step", *names, "entropy"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = study_parser(__doc__, "control_long")
    parser.add_argument("--model", required=True, help="folder with a policy that solves half of the problems")
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--learning_rate", type=float, default=5e-6)
    parser.add_argument("--bf16", action="store_true", help="for processors that have it")
    parser.set_defaults(task="arithmetic", steps=160, every=40, micro_batch=64, problems=1_100, held_out=1_000)
    parser.set_defaults(threads=1, data=Path("."), sampled=SAMPLED)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Make and report the runs; returns them."""
    options = placed(parse(argv))
    if options.quick:
        options.steps, options.every, options.problems, options.held_out, options.sampled = 4, 2, 100, 10, 5
    runs, facts = kept_runs(planned(options))
    facts |= {key: getattr(options, key) for key in ("steps", "problems", "held_out", "sampled")}
    save_table("control_long", facts, runs, options.results)
    print(table(runs))
    return runs


if __name__ == "__main__":
    main()
