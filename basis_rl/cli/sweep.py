"""``basis-rl sweep RECIPE --baselines a,b,c --seeds 0,1,2``."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers.utils.generic import flatten_dict

from basis_rl.baselines import BASELINES, Baseline
from basis_rl.cli.compare import main as compare
from basis_rl.cli.main import FAILED, STOPPED
from basis_rl.cli.options import sweep_parser
from basis_rl.estimate.footprint import read_launch
from basis_rl.recipe.build import check_recipe
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.registry import find
from basis_rl.report.runs import what_counts
from basis_rl.run.artefacts import differences
from basis_rl.run.record import is_finished
from basis_rl.run.run_lock import held
from basis_rl.run.seams import attributes
from basis_rl.run.terminal import handling_stop_signals
from basis_rl.trainer import BasisConfig

# Keys that the sweep sets for each run, and the option that says how.
_OURS = {"seed": "--seeds", "baseline": "--baselines", "resume_from_checkpoint": "nothing"}
# Rollouts per prompt for a baseline that needs several, if no setting says how many.
_GROUP = 8
_TRAIN = [sys.executable, "-m", "basis_rl", "train"]
# Keys whose values may contain commas, which do not separate runs. The same holds for keys that do not count as
# settings of a run (`what_counts`).
_WHOLE = {"system_prompt", "prompt_template", "solution_pattern", "keep_columns", "choices_column", "reward_funcs",
          "serve_args"}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Plan, check everything, run, compare."""
    options, overrides = sweep_parser().parse_known_args(argv)
    asked = {"accelerate_config": options.accelerate_config, "num_processes": options.num_processes}
    launch = [word for key, value in asked.items() if value is not None for word in (f"--{key}", str(value))]
    if launch and not options.accelerate_config:
        raise ValueError("--num_processes needs --accelerate_config, which starts the processes (ddp, zero3, a file).")
    with several(read_launch(options.accelerate_config, options.num_processes).world):
        runs = plan(
            options.recipe,
            [name for word in options.baselines for name in word.split(",") if name],
            parse_seeds(",".join(options.seeds)),
            options.output_dir,
            overrides=overrides,
            budget=options.budget,
        )
        waiting = [run for run in runs if not has_finished(run)]
        print(overview(runs, waiting), flush=True)
        check_all(waiting)
    sweep = Sweep(waiting, launch)
    output = Path(runs[0].recipe.args.output_dir).parent
    with held(output):
        failed = sweep.run()
    if sweep.stopped:
        print("Stopped. The same command resumes.")
        return STOPPED
    done = [run.recipe.args.output_dir for run in runs if run not in failed]
    try:
        code = compare([*done, "--output_dir", str(output / "report")]) if done else FAILED
    finally:
        for run in failed:
            last = log_file(run).read_text(errors="replace").strip().splitlines()[-1:]
            print(f"FAILED: {run.name}: {''.join(last)[:300]} (log: {log_file(run)})")
    return FAILED if failed else code


def parse_seeds(text: str) -> list[int]:
    """``0,1,2``.

    Raises:
        ValueError: something else.
    """
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"--seeds must be whole numbers with commas between them (0,1,2), got '{text}'.")
    return [int(seed) for seed in text.split(",")]


def overview(runs: Sequence[Planned], waiting: Sequence[Planned]) -> str:
    """What will be run, and what was adapted."""
    args = runs[0].recipe.args
    lines = [f"{len(runs)} runs in {Path(args.output_dir).parent}, {len(runs) - len(waiting)} of them finished."]
    for run in runs:
        notes = f" ({', '.join(run.notes)})" if run.notes else ""
        lines.append(f"  {run.name}{notes}{'' if run in waiting else '  finished, skipped'}")
    if waiting and args.save_strategy == "no":
        lines.append("The recipe saves no checkpoints (save_strategy): a run that is interrupted starts again.")
    return "\n".join(lines)


def has_finished(run: Planned) -> bool:
    """Whether its folder holds this run, with the same settings, trained to the end.

    Raises:
        ValueError: the folder holds a run of other settings.
    """
    folder = Path(run.recipe.args.output_dir)
    if not (folder / "recipe.yaml").is_file():
        return False
    # Both sides as YAML reads them, or a tuple would differ from a list.
    there = what_counts(flatten_dict(yaml.safe_load((folder / "recipe.yaml").read_text()) or {}))
    asked = what_counts(flatten_dict(yaml.safe_load(yaml.safe_dump(run.recipe.resolved))))
    if other := differences(there, asked):
        shown = "; ".join(other[:5])
        raise ValueError(f"'{folder}' holds a run of other settings ({shown}). Remove it, or set another --output_dir.")
    return is_finished(folder)


def check_all(runs: Sequence[Planned]) -> None:
    """All that training checks before its first step, once for runs that differ in the seed alone.

    Raises:
        ValueError: names the run.
    """
    first: dict[str, Planned] = {}
    for run in runs:
        first.setdefault(run.variant, run)
    for run in first.values():
        print(f"Checking {run.name} ...", flush=True)
        try:
            check_recipe(run.recipe)
        except (ValueError, OSError) as error:
            raise ValueError(f"{run.name}: {error}") from error


def log_file(run: Planned) -> Path:
    """Where all that a run prints goes."""
    return Path(run.recipe.args.output_dir) / "train.log"


class Sweep:
    """Runs one after the other. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C go to the run as SIGTERM, so that it can leave a
    checkpoint; the second one kills it."""

    def __init__(self, runs: Sequence[Planned], launch: Sequence[str]) -> None:
        self.runs = list(runs)
        self.launch = list(launch)
        self.stopped = False
        self._process: subprocess.Popen[str] | None = None

    def run(self) -> list[Planned]:
        """The runs that failed."""
        failed = []
        with handling_stop_signals(self._stop):
            for number, run in enumerate(self.runs, 1):
                prefix = f"[{number}/{len(self.runs)} {run.name}]"
                code = self._train(run, prefix)
                if self.stopped or code == STOPPED:
                    self.stopped = True
                    break
                if code:
                    failed.append(run)
                    print(f"{prefix} failed with exit code {code}", flush=True)
        return failed

    def _train(self, run: Planned, prefix: str) -> int:
        log = log_file(run)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [*_TRAIN, *run.argv, *self.launch]
        print(f"{prefix} {shlex.join(command)}", flush=True)
        # In a session of its own: a terminal's Ctrl-C would kill it before it could save.
        options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        with log.open("a") as file, subprocess.Popen(command, start_new_session=True, **options) as process:
            self._process = process
            # A signal may have come while the process was being started.
            if self.stopped:
                process.terminate()
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                if re.match(r"step \d+/\d+ ", line):
                    print(f"{prefix} {line.rstrip()}", flush=True)
        self._process = None
        return process.returncode

    def _stop(self, number: int, frame: Any) -> None:
        if self._process is not None:
            if self.stopped:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                # Not to its group: its grading processes must continue until it has saved.
                self._process.terminate()
        self.stopped = True


@dataclass(frozen=True)
class Planned:
    """One run: its folder's name, the name that it shares with other seeds, the arguments of `basis-rl train`, and what
    was adapted to its baseline."""

    name: str
    variant: str
    argv: list[str]
    recipe: Recipe
    notes: list[str]


def parse_entry(text: str) -> tuple[str, dict[str, str]]:
    """One of ``--baselines``, ``NAME[:KEY=VALUE]...``: the name (registered, or ``module:Class``), and the settings
    that only its runs have.
    """
    parts = text.split(":")
    settings = dict(part.removeprefix("--").split("=", 1) for part in parts if "=" in part)
    name = ":".join(part for part in parts if "=" not in part)
    return name, settings


def plan(
    recipe: str,
    baselines: Sequence[str],
    seeds: Sequence[int],
    output: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    budget: float | None = None,
) -> list[Planned]:
    """The runs, seed by seed and each with all baselines. All of them draw the same number of rollouts. It is called
    within `several`, which knows the launcher's processes.

    - A baseline that needs a group, where the recipe has one rollout per prompt, gets eight of them: as many rollouts
      per batch, of fewer prompts. The others keep one. Evaluation does not change.
    - Parameters of the recipe's ``baseline_kwargs`` that another baseline does not have are left out.
    - ``max_steps`` follows from the number of rollouts, in which the greedy ones of `remax` count.

    Args:
        recipe: path.
        baselines: see `parse_entry`.
        seeds: of the runs.
        output: folder of the sweep; default: the recipe's ``output_dir`` with ``-sweep``.
        overrides: ``--key value`` for all runs; ``--key a,b`` makes a run of each.
        budget: rollouts of each run; default: those of the recipe.

    Raises:
        ValueError: a setting that is wrong, or a number of rollouts that is not known.
    """
    common, grid = _split_grid(overrides)
    base = parse_recipe([recipe, *common])
    output = output or Path(f"{base.args.output_dir}-sweep")
    total = int(budget) if budget is not None else _total(base)
    variants: dict[str, tuple[list[str], list[str]]] = {}
    for text in baselines:
        baseline, own = parse_entry(text)
        for values in itertools.product(*grid.values()):
            # The entry's own settings win over those of all runs.
            settings = own | {k: v for k, v in zip(grid, values, strict=True) if k not in own and _takes(baseline, k)}
            name = "-".join([baseline, *(f"{k}={v}" for k, v in settings.items())])
            variants[name] = _adapt([recipe, *common], base, baseline, settings, total)
    planned = []
    for seed in seeds:
        for name, (argv, notes) in variants.items():
            folder = re.sub(r"[^A-Za-z0-9._=-]+", "_", f"{name}-seed{seed}")
            arguments = [*argv, "--seed", str(seed), "--output_dir", str(output / folder)]
            arguments += ["--resume_from_checkpoint", "auto"]
            # With one repository, each run would overwrite the one before.
            if base.args.push_to_hub and base.args.hub_model_id:
                suffix = re.sub(r"[^A-Za-z0-9._-]+", "-", folder)
                arguments += ["--hub_model_id", f"{base.args.hub_model_id}-{suffix}"]
            planned.append(Planned(folder, name, arguments, parse_recipe(arguments), notes))
    return planned


def _split_grid(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides with one value, and those with several."""
    common: list[str] = []
    grid: dict[str, list[str]] = {}
    words = list(overrides)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        key = flag.removeprefix("--")
        if not flag.startswith("--") or (not equals and not words):
            raise ValueError(f"'{flag}': expected `--key value` or `--key value,value`.")
        if key in _OURS:
            raise ValueError(f"--{key} is set by the sweep for each run; give {_OURS[key]} instead.")
        value = value if equals else words.pop(0)
        if "," in value and value[0] not in "[{" and key not in _WHOLE and what_counts({key: value}):
            grid[key] = value.split(",")
        else:
            common += [flag, value]
    return common, grid


def several(processes: int) -> AbstractContextManager[None]:
    """Within it settings are made as on one of `processes` ranks, because batch sizes depend on their number."""
    return attributes(BasisConfig, world_size=property(lambda self: processes))


def _takes(baseline: str, key: str) -> bool:
    """Whether a key is of every recipe, or a parameter that this baseline has."""
    section, _, name = key.partition(".")
    return section != "baseline_kwargs" or name in inspect.signature(find("baseline", BASELINES, baseline)).parameters


def _adapt(
    argv: Sequence[str], base: Recipe, baseline: str, settings: dict[str, str], total: int
) -> tuple[list[str], list[str]]:
    """The arguments of an entry's runs, and what differs from the recipe because its baseline needs it."""
    kind: type[Baseline] = find("baseline", BASELINES, baseline)
    notes = []
    arguments = [*argv, "--baseline", baseline]
    given = base.run.baseline_kwargs or {}
    if baseline != base.run.baseline and given:
        kept = {k: v for k, v in given.items() if k in inspect.signature(kind).parameters}
        arguments += ["--baseline_kwargs", json.dumps(kept)]
        if kept != given:
            notes.append(f"without baseline_kwargs {', '.join(k for k in given if k not in kept)}")
    rollouts = base.args.num_generations
    if "num_generations" not in settings and rollouts < kind.min_group_size:
        arguments += ["--num_generations", str(_GROUP)]
        notes.append(f"num_generations {_GROUP}")
    if base.args.eval_strategy != "no" and base.args.num_generations_eval is None:
        arguments += ["--num_generations_eval", str(rollouts)]
    for key, value in settings.items():
        arguments += [f"--{key}", value]
    if "max_steps" in settings:
        return arguments, notes
    drawn, updates = _batch(parse_recipe(arguments))
    batches = total // drawn
    steps = int(batches * updates)
    if steps < 1:
        raise ValueError(f"{baseline}: {total:,} rollouts are less than one optimizer step. Raise --budget.")
    if math.ceil(base.args.max_steps / updates) != batches:
        arguments += ["--max_steps", str(steps)]
        notes.append(f"max_steps {steps}")
    return arguments, notes


def _batch(recipe: Recipe) -> tuple[int, float]:
    """Rollouts of a generation batch, and optimizer steps on it."""
    args = recipe.args
    rollouts = args.generation_batch_size
    if "greedy_rewards" in find("baseline", BASELINES, recipe.run.baseline).requires:
        rollouts += args.generation_batch_size // args.num_generations
    return rollouts, args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps


def _total(base: Recipe) -> int:
    if base.args.max_steps <= 0:
        # One epoch with one rollout per prompt and with several is not the same number of rollouts.
        raise ValueError("The recipe counts epochs instead of rollouts. Give --budget ROLLOUTS, or set max_steps.")
    rollouts, updates = _batch(base)
    return math.ceil(base.args.max_steps / updates) * rollouts
