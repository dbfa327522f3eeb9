"""One line per log on the terminal, every metric in a file, a plot at the end."""

from __future__ import annotations

import json
import logging
import os
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from basis_rl.run.artefacts import read_lines, write_whole
from basis_rl.run.disk import naming_a_full_disk
from basis_rl.run.run_lock import check_place

PLOT = "training.png"
WIDTH = 80
Plot = Callable[..., Any]
_FILE = "metrics.jsonl"
_ROWS = 100  # of the log that a checkpoint has itself
# Metric, its label, what the label means; the first ones stay when a line is too narrow for all.
_SHOWN = (
    ("reward", "reward", "mean reward of the sampled rollouts"),
    ("baseline/mse_to_reward", "err", "mean squared error of the baseline"),
    ("advantages/zero", "zero", "share of the rollouts that teach nothing"),
    ("completions/mean_length", "len", "mean tokens per rollout"),
    ("entropy", "ent", "entropy per token in nats"),
    ("kl", "kl", "divergence from the reference"),
    ("baseline/beta", "tilt", "calibrated beta of the baseline"),
)
_EVALUATED = re.compile(r"eval_(?:(?P<name>.+)_)?(?P<metric>(?:avg|pass)@\d+)")
_logger = logging.getLogger(__name__)


class ProgressLines(TrainerCallback):
    """Prints step, the main metrics and the time left in at most 80 columns; all metrics go to ``metrics.jsonl`` in
    `output_dir`, and at the end `plot`, given the log, draws the run into ``training.png``.

    Takes the place of transformers' progress bar, which prints every metric in one line of a thousand characters.
    """

    def __init__(self, plot: Plot) -> None:
        self._plot = plot
        self._began = time.perf_counter()
        self._first_step = 0
        self._explained: set[str] = set()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began, self._first_step, self._explained = time.perf_counter(), state.global_step, set()
        if state.is_world_process_zero and args.output_dir:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            _forget_after(Path(args.output_dir) / _FILE, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or not args.output_dir:
            return
        path = Path(args.output_dir) / _FILE
        check_place(path.parent)
        with naming_a_full_disk(path.parent):
            _append(path, json.dumps({"step": state.global_step, **logs}))
        shown = {label: f"{logs[key]:.3g}" for key, label, _ in _SHOWN if logs.get(key) is not None}
        if shown:
            self._explain(shown)
            print(self._line(state, shown), flush=True)
        for line in evaluation_lines(logs, how_sampled(args)):
            print(f"step {state.global_step}/{state.max_steps}  {line}", flush=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not args.output_dir:
            return
        try:
            self._plot(state.log_history, Path(args.output_dir) / PLOT, title=Path(args.output_dir).name)
        except Exception:
            _logger.warning("The plot of the run could not be drawn; the run is not affected.", exc_info=True)

    def _explain(self, shown: Mapping[str, str]) -> None:
        """Say once what the labels mean."""
        new = [f"{label}: {meaning}" for _, label, meaning in _SHOWN if label in shown and label not in self._explained]
        self._explained.update(shown)
        if new:
            print(textwrap.fill("; ".join(new) + ".", WIDTH), flush=True)

    def _line(self, state: TrainerState, shown: Mapping[str, str]) -> str:
        """Step, as many metrics as there is room for, and time left."""
        done = state.global_step - self._first_step
        seconds = (time.perf_counter() - self._began) / max(1, done)
        left = f"  {clock(seconds * (state.max_steps - state.global_step))} left"
        line = f"step {state.global_step}/{state.max_steps} "
        for label, value in shown.items():
            part = f" {label} {value} "
            if len(line) + len(part) + len(left) - 1 <= WIDTH:
                line += part
        return line.rstrip() + left


def use_progress_lines(trainer: Trainer, plot: Plot) -> None:
    """Put `ProgressLines` in the place of transformers' progress bar or printed dictionaries."""
    for bar in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(bar)
    trainer.add_callback(ProgressLines(plot))


def clock(seconds: float) -> str:
    """``1:02:03``."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def how_sampled(args: Any) -> str:
    """How the rollouts of an evaluation are drawn: ``greedy``, or ``sampled`` with the temperature."""
    if args.temperature == 0 or args.top_k == 1:
        return "greedy"
    return f"sampled at temperature {args.temperature:g}"


def evaluation_lines(logs: Mapping[str, Any], how: str) -> list[str]:
    """One line per evaluation set with its avg@k and its largest pass@k, which tells how the rollouts were drawn."""
    found: dict[str, dict[str, str]] = {}
    for key, value in logs.items():
        match = _EVALUATED.fullmatch(key)
        if match:
            # Of several pass@k the last one is logged for the largest k.
            kind = match["metric"].partition("@")[0]
            found.setdefault(match["name"] or "", {})[kind] = f"{match['metric']} {value:.3g}"
    return [
        f"eval{' ' + name if name else ''}  {'  '.join(scores.values())}  ({how})" for name, scores in found.items()
    ]


def newest_rows(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the last steps of a log, which a checkpoint keeps: with all of them it would grow with each step."""
    first = log[-_ROWS:][0]["step"] if log else 0
    return [row for row in log if row["step"] >= first]


def whole_log(folder: Path, newest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`newest_rows` of a checkpoint with those before them, from the ``metrics.jsonl`` beside it if it is there."""
    first = newest[0]["step"] if newest else 0
    return [row for row in read_lines(folder.parent / _FILE) if row["step"] < first] + newest


def _append(path: Path, line: str) -> None:
    """Add a line; where the last one was cut off by a kill or a full disk, on a line of its own."""
    with path.open("ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        cut = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if cut else b"") + line.encode() + b"\n")


def _forget_after(path: Path, step: int) -> None:
    """Drop what an earlier run in the same folder logged after `step`: all of it, unless this one resumes."""
    if not path.is_file():
        return
    kept = [json.dumps(row) + "\n" for row in read_lines(path) if row["step"] <= step and step]
    write_whole(path, "".join(kept))
