"""``basis-rl sweep RECIPE --baselines a,b,c --seeds 0,1,2``."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import yaml
from transformers.utils.generic import flatten_dict

from basis_rl.cli.check import check_quietly
from basis_rl.cli.compare import main as compare
from basis_rl.cli.main import FAILED, STOPPED
from basis_rl.cli.options import sweep_parser
from basis_rl.cli.sweep_plan import Planned, launcher_processes, plan, several
from basis_rl.report.runs import what_counts
from basis_rl.run.checkpoint import was_cut_off
from basis_rl.run.run_lock import held

_SHOW_EVERY = 15.0


def main(argv: Sequence[str]) -> int:
    """Plan, check everything, run, compare."""
    options, overrides = sweep_parser().parse_known_args(argv)
    generations = options.num_generations
    # Several values make several runs; a wrong one is refused later, like that of any key.
    if generations is not None and not generations.isdecimal():
        overrides = [*overrides, "--num_generations", generations]
        generations = None
    launcher = shlex.split(options.launcher) or [sys.executable]
    if shutil.which(launcher[0]) is None:
        raise ValueError(f"--launcher: there is no program '{launcher[0]}'. Install it, or give its path.")
    with several(launcher_processes(options.launcher)):
        runs = plan(
            options.recipe,
            [name for word in options.baselines for name in word.split(",") if name],
            parse_seeds(",".join(options.seeds)),
            options.output_dir,
            overrides=overrides,
            budget=None if options.budget is None else int(options.budget),
            num_generations=None if generations is None else int(generations),
        )
        waiting = [run for run in runs if not has_finished(run)]
        print(overview(runs, waiting), flush=True)
        check_all(waiting)
    sweep = Sweep([*launcher, "-m", "basis_rl", "train"], waiting)
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
        state = "" if run in waiting else "  finished, skipped"
        lines.append(f"  {run.name}{notes}{state}")
    if waiting and args.save_strategy == "no":
        lines.append("The recipe saves no checkpoints (save_strategy): a run that is interrupted starts again.")
    return "\n".join(lines)


def has_finished(run: Planned) -> bool:
    """Whether its folder holds this very run, trained to the end.

    Raises:
        ValueError: the folder holds a run of other settings.
    """
    folder = Path(run.recipe.args.output_dir)
    if not (folder / "recipe.yaml").is_file():
        return False
    # Both sides as YAML reads them, or a tuple would differ from a list.
    there = what_counts(flatten_dict(yaml.safe_load((folder / "recipe.yaml").read_text()) or {}))
    asked = what_counts(flatten_dict(yaml.safe_load(yaml.safe_dump(run.recipe.resolved))))
    other = sorted(key for key in there.keys() | asked.keys() if there.get(key) != asked.get(key))
    if other:
        shown = ", ".join(f"{key}: {there.get(key)} there, {asked.get(key)} now" for key in other[:5])
        raise ValueError(
            f"'{folder}' holds a run of other settings ({shown}). Give another --output_dir, or remove that folder."
        )
    record = folder / "run.json"
    return not was_cut_off(folder) and record.is_file() and bool(json.loads(record.read_text()).get("finished"))


def check_all(runs: Sequence[Planned]) -> None:
    """All that training checks before its first step, once for runs that differ in the seed alone.

    Raises:
        ValueError: names the run.
    """
    seen = set()
    for run in runs:
        settings = json.dumps(what_counts(flatten_dict(run.recipe.resolved)), sort_keys=True, default=str)
        if settings in seen:
            continue
        seen.add(settings)
        print(f"Checking {run.name} ...", flush=True)
        try:
            check_quietly(run.recipe)
        except (ValueError, OSError) as error:
            raise ValueError(f"{run.name}: {error}") from error


def log_file(run: Planned) -> Path:
    """Where all that a run prints goes."""
    return Path(run.recipe.args.output_dir) / "train.log"


_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Sweep:
    """Runs one after the other. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C go to the run as SIGTERM, so that it can leave a
    checkpoint; the second one kills it."""

    def __init__(self, command: Sequence[str], runs: Sequence[Planned]) -> None:
        self.command = list(command)
        self.runs = list(runs)
        self.stopped = False
        self._process: subprocess.Popen[str] | None = None

    def run(self) -> list[Planned]:
        """The runs that failed."""
        failed = []
        began = time.monotonic()
        handlers = {number: signal.signal(number, self._stop) for number in _STOPS}
        try:
            for done, run in enumerate(self.runs):
                code = self._train(run, f"[{done + 1}/{len(self.runs)} {run.name}]")
                if self.stopped or code == STOPPED:
                    self.stopped = True
                    break
                if code:
                    failed.append(run)
                    print(f"[{done + 1}/{len(self.runs)} {run.name}] failed with exit code {code}", flush=True)
                left = (time.monotonic() - began) / (done + 1) * (len(self.runs) - done - 1)
                if done + 1 < len(self.runs):
                    print(f"{done + 1} of {len(self.runs)} runs done, about {left / 60:.0f} min left", flush=True)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return failed

    def _train(self, run: Planned, prefix: str) -> int:
        log = log_file(run)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [*self.command, *run.argv]
        print(f"{prefix} {shlex.join(command)}", flush=True)
        # In a session of its own: a terminal's Ctrl-C would kill it before it could save.
        with (
            log.open("a") as file,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                start_new_session=True,
            ) as process,
        ):  # fmt: skip
            self._process = process
            # A signal may have come while the process was being started.
            if self.stopped:
                process.terminate()
            assert process.stdout is not None
            self._show(process.stdout, file, prefix)
        self._process = None
        return process.returncode

    def _show(self, output: IO[str], log: IO[str], prefix: str) -> None:
        shown = 0.0
        for line in output:
            log.write(line)
            log.flush()
            step = re.match(r"step (\d+)/(\d+) ", line)
            if step and (time.monotonic() - shown > _SHOW_EVERY or step[1] == step[2]):
                shown = time.monotonic()
                print(f"{prefix} {line.rstrip()}", flush=True)

    def _stop(self, number: int, frame: Any) -> None:
        if self._process is not None:
            if self.stopped:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                # Not to its group: its grading processes must continue until it has saved.
                self._process.terminate()
        self.stopped = True
