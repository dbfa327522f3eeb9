"""What does it gain to train on rollouts as they end, on two cores: a vLLM server on one, the trainer on the other?

    python -m studies.clock.streams --model FOLDER [--part tools | lengths] [--rows ROW ...] [--seeds 0 1 2] [--report]

- ``tools``: SmolLM2 learns to call a calculator whose answers take a log-normal time (median 1 s, one in a hundred 20 s
  or more, the same for every row). The model is that of ``studies.clock.warm --task tooled``.
- ``lengths``: SmolLM2-135M-Instruct explains things in 1 to 256 tokens; only the time counts, for each token that is
  trained on: a stream's first batches are of the rollouts that end first, the short ones.

Level: a probability of ``--level`` to solve a held-out problem (`studies.clock.streams_run.accuracy`), as measured when
the training is over, with the weights of every `--every` steps. Time is wall time. A step's seconds are the mean of all
steps but the first.

Each run starts and stops its own server and is stored in ``runs/streams``, so the command can be stopped and called
again. ``--report`` shows all stored runs, whatever is asked for. The row ``prefetch`` is of commit 4ff430e8: copy
``studies/clock`` into a checkout of it, and run it there with the same ``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

from basis_rl.engine.server import Server, ServerOptions
from basis_rl.text import markdown_table
from studies.clock.run import ROWS as CLOCK_ROWS
from studies.drawing import save
from studies.runs import Planned, kept_runs, placed, save_table, study_parser

STREAM = {"rollouts": "stream"}
GROUPS, NONE = CLOCK_ROWS["grpo"], CLOCK_ROWS["none"]
BELIEF = CLOCK_ROWS["basis_history with text, frontier"]
# A critic of the model's own size, not trained before. The runs are too short for its usual warm-up and rate.
SAO = {
    "baseline": "sao",
    "baseline_kwargs": {"critic_warmup_steps": 2, "critic_learning_rate": 5e-5},
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_min": 0.7,
    "vllm_importance_sampling_clip_max": 6.0,
}
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "tools": {
        "sync, groups": GROUPS,
        "sync, basis_history": BELIEF,
        "stream, groups": {**GROUPS, **STREAM},
        "stream, none": {**NONE, **STREAM},
        "stream, basis_history": {**BELIEF, **STREAM},
        "stream, sao": {**SAO, **STREAM},
    },
    "lengths": {"sync": NONE, "prefetch": {**NONE, "async_prefetch": True}, "stream": {**NONE, **STREAM}},
}
# Steps of a run, by the first word of its row.
STEPS = {"tools": {"sync": 11, "stream": 16}, "lengths": {"sync": 12, "prefetch": 12, "stream": 12}}
RATES = {"tools": 1e-5, "lengths": 1e-6}
ROLLOUTS = 32
TRAINER_CORE, SERVER_CORE = 0, 1


def run(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One training in a process of its own, with its server."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    # The server is started with this process's cores, the trainer's are set for it.
    os.sched_setaffinity(0, {SERVER_CORE % (os.cpu_count() or 1)})
    dtype = "bfloat16" if plan["settings"]["bf16"] else "float32"
    options = ServerOptions(plan["model"], port=0, dtype=dtype, max_model_len=512, log=folder / "server.log")
    with Server(options) as server:
        file = folder / "plan.json"
        file.write_text(json.dumps({**plan, "url": server.url}))
        words = ["taskset", "-c", str(TRAINER_CORE), sys.executable, "-m", "studies.clock.streams_run", str(file)]
        with (folder / "trainer.log").open("w") as log:
            code = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise SystemExit(f"The run in {folder} ended with exit code {code}; see its trainer.log.")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def planned(options: argparse.Namespace) -> list[Planned]:
    """The runs in their order: all rows of a seed, then those of the next."""
    plans = []
    for seed in options.seeds:
        for row in options.rows or [row for row in ROWS[options.part] if row != "prefetch"]:
            steps = options.steps or STEPS[options.part][row.split(",")[0]]
            settings = {
                "seed": seed, "max_steps": steps, "bf16": options.bf16,
                "learning_rate": options.learning_rate or RATES[options.part], "warmup_steps": 2,
                "per_device_train_batch_size": options.micro_batch,
                "gradient_accumulation_steps": ROLLOUTS // options.micro_batch, "keep_rollouts_mb": 0,
            }  # fmt: skip
            if options.part == "tools":
                settings["max_tool_calling_iterations"] = 1
            plan = {
                "part": options.part, "row": ROWS[options.part][row], "model": str(Path(options.model).resolve()),
                "every": options.every, "median": options.median, "held_out": options.held_out,
                "settings": settings,
            }  # fmt: skip
            name = f"{options.part}-{row.replace(', ', '-')}-seed{seed}"
            labels = {"part": options.part, "row": row, "seed": seed}
            make = partial(run, plan, options.output / name)
            plans.append(Planned(labels, options.output / f"{name}.json", plan, make))
    return plans


def stored(folder: Path) -> list[dict[str, Any]]:
    """All finished runs of a folder, in the order of `ROWS`."""
    found = []
    for part, rows in ROWS.items():
        for row in rows:
            for file in sorted(folder.glob(f"{part}-{row.replace(', ', '-')}-seed*.json")):
                run = json.loads(file.read_text())
                found.append({"part": part, "row": row, "seed": run["settings"]["settings"]["seed"], **run})
    return found


def seconds(run: dict[str, Any]) -> float:
    """Of a step, the mean of all but the first."""
    return (run["wall"][-1] - run["wall"][0]) / (len(run["wall"]) - 1)


def seconds_per_1000_tokens(run: dict[str, Any]) -> float | None:
    """Of the rollouts that are trained on, from the third step on, if there is one: until then a stream fills."""
    tokens = ROLLOUTS * sum(run["logs"]["completions/mean_length"][2:])
    return 1000 * (run["wall"][-1] - run["wall"][1]) / tokens if tokens else None


def minutes_to(run: dict[str, Any], level: float) -> float | None:
    """Minutes until the first measurement at the level; None if there is none."""
    for point in run["points"]:
        if point["all"] >= level:
            return run["wall"][point["step"] - 1] / 60 if point["step"] else 0.0
    return None


def line(run: dict[str, Any], level: float) -> dict[str, Any]:
    """What the table says of a run."""
    logs = run["logs"]
    found: dict[str, Any] = {name: run[name] for name in ("part", "row", "seed")}
    found |= {"steps": len(run["wall"]), "seconds a step": seconds(run), "minutes": minutes_to(run, level)}
    found["seconds per 1000 tokens"] = seconds_per_1000_tokens(run)
    measured = [point["all"] for point in run["points"]] or [None]
    found |= {"first": measured[0], "end": measured[-1]}
    for name in ("time/generation", "rollout/waited", "rollout/staleness"):
        # The first batch of a stream is waited for as that of any other run.
        found[name] = fmean(logs[name][1:]) if len(logs[name]) > 1 else None
    found["rollout/staleness_max"] = max(logs["rollout/staleness_max"], default=None)
    return found


def table(runs: list[dict[str, Any]], level: float) -> str:
    """A line for each row; its seeds are separated by commas."""
    lines = defaultdict(list)
    for each in runs:
        lines[each["part"], each["row"]].append(line(each, level))

    def cell(found: list[dict[str, Any]], name: str, form: str) -> str:
        return ", ".join("-" if each.get(name) is None else format(each[name], form) for each in found)

    columns = {
        "seed": "d", "seconds a step": ".1f", "seconds per 1000 tokens": ".1f", "minutes": ".1f", "end": ".1%",
        "time/generation": ".1f",
        "rollout/waited": ".1f", "rollout/staleness": ".2f", "rollout/staleness_max": ".0f",
    }  # fmt: skip
    head = ["part", "row", "seeds", *list(columns)[1:3], f"minutes to {level:.0%}", "at the end", *list(columns)[5:]]
    body = [[*key, *(cell(found, name, form) for name, form in columns.items())] for key, found in lines.items()]
    return markdown_table(body, head)


def draw(runs: list[dict[str, Any]], level: float, path: Path) -> None:
    """Accuracy over minutes, a colour for each row and a line for each seed; and seconds per token."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2))
    names = list(dict.fromkeys((each["part"], each["row"]) for each in runs))
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    for each in runs:
        name = each["part"], each["row"]
        is_first = each is next(other for other in runs if (other["part"], other["row"]) == name)
        minutes = [each["wall"][point["step"] - 1] / 60 if point["step"] else 0.0 for point in each["points"]]
        if minutes:
            accuracy = [point["all"] for point in each["points"]]
            left.plot(minutes, accuracy, color=colours[name], marker=".", label=name[1] if is_first else None)
    left.axhline(level, color="grey", linewidth=0.8, linestyle="--")
    left.set(xlabel="minutes of training", ylabel="held-out problems solved", ylim=(0, None), xlim=(0, None))
    if left.get_legend_handles_labels()[0]:
        left.legend(frameon=False)
    left.grid(alpha=0.3)
    for number, name in enumerate(reversed(names)):
        found = [seconds_per_1000_tokens(each) or 0.0 for each in runs if (each["part"], each["row"]) == name]
        right.barh(number, fmean(found), color=colours[name], alpha=0.6)
        right.plot(found, [number] * len(found), "k.", markersize=4)
    right.set_yticks(range(len(names)), [": ".join(name) for name in reversed(names)])
    right.set(xlabel="seconds per 1,000 trained tokens (dots: seeds)")
    figure.tight_layout()
    save(figure, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = study_parser(__doc__, "streams")
    parser.add_argument("--model", default="runs/smollm2/model", help="folder of the part's model")
    parser.add_argument("--part", choices=list(ROWS), default="tools")
    parser.add_argument("--rows", nargs="+", help="(all but prefetch)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help=f"({STEPS})")
    parser.add_argument("--every", type=int, default=1, help="steps between measurements")
    parser.add_argument("--learning_rate", type=float, help=f"({RATES})")
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--median", type=float, default=1.0, help="of the calculator's seconds")
    parser.add_argument("--held_out", type=int, default=48)
    parser.add_argument("--level", type=float, default=0.65)
    parser.add_argument("--bf16", action="store_true", help="for processors that have it")
    parser.add_argument("--report", action="store_true", help="print and plot the stored runs, and train nothing")
    options = parser.parse_args(argv)
    for row in options.rows or []:
        if row not in ROWS[options.part]:
            parser.error(f"the part {options.part} has the rows {', '.join(map(repr, ROWS[options.part]))}")
    return options


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the study; returns the lines of its table."""
    options = placed(parse(argv))
    if options.quick:
        options.steps, options.every, options.held_out, options.seeds, options.median = 2, 1, 10, [0], 0.1
    facts: dict[str, Any] = {}
    if not options.report:
        _, facts = kept_runs(planned(options))
    runs = stored(options.output)
    lines = [line(each, options.level) for each in runs]
    print(table(runs, options.level))
    draw(runs, options.level, options.results / "streams.png")
    save_table("streams", {**facts, "level": options.level}, lines, options.results)
    return lines


if __name__ == "__main__":
    main()
