"""One line per log on the terminal, every metric in a file, a plot at the end."""

from __future__ import annotations

import json
import logging
import os
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from basis_rl.run.artefacts import read_lines, write_whole
from basis_rl.run.disk import naming_a_full_disk
from basis_rl.run.run_lock import check_place

PLOT = "training.png"
WIDTH = 80
LOG = "metrics.jsonl"
Plot = Callable[..., Any]
# Rows of the log that a checkpoint has itself.
_ROWS = 100
# The metric of a column that only a run with ``rollouts: stream`` has.
_WAITED = "rollout/waited_share"
# A column's metric, heading, width, and what the heading means; the last ones go where a line is too narrow for all.
_COLUMNS = (
    ("reward", "reward", 8, "mean reward of the sampled rollouts"),
    ("completions/mean_length", "len", 7, "mean tokens per rollout"),
    ("completions/clipped_ratio", "cut", 7, "share of the rollouts that were cut off"),
    ("step_time", "s/step", 8, "seconds per step"),
    (_WAITED, "wait", 7, "share of the time that the trainer waited for rollouts"),
    ("tokens_per_second", "tok/s", 7, "tokens per second"),
    ("learning_rate", "lr", 9, "learning rate"),
    ("baseline/mse_to_reward", "err", 8, "mean squared error of the baseline"),
    ("advantages/zero", "zero", 7, "share of the rollouts that teach nothing"),
)
_LEFT = 9
# Lines between two headings.
_PAGE = 25
EVALUATED = re.compile(r"eval_(?:(?P<name>.+)_)?(?P<metric>(?:avg|pass)@\d+)")
_logger = logging.getLogger(__name__)


class ProgressLines(TrainerCallback):
    """Prints step, the main metrics and the time left as a table of 80 characters; all metrics go to
    ``metrics.jsonl`` in `output_dir`, and at the end `plot`, given the log, draws the run into ``training.png``.

    Takes the place of transformers' progress bar, which prints every metric in one line of a thousand characters.
    """

    def __init__(self, plot: Plot) -> None:
        self._plot = plot
        self._began = time.perf_counter()
        self._first_step = 0
        self._streams = False
        # Printed so far.
        self._lines = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()
        self._first_step = state.global_step
        self._streams = getattr(args, "streams", False)
        self._lines = 0
        if state.is_world_process_zero and args.output_dir:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            _forget_after(Path(args.output_dir) / LOG, state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs or not args.output_dir:
            return
        path = Path(args.output_dir) / LOG
        check_place(path.parent)
        with naming_a_full_disk(path.parent):
            _append(path, json.dumps({"step": state.global_step, **logs}))
        if any(logs.get(key) is not None for key, *_ in _COLUMNS):
            self._print_row(state, logs)
        for line in evaluation_lines(logs, how_sampled(args)):
            print(f"step {state.global_step}/{state.max_steps}  {line}", flush=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not args.output_dir:
            return
        try:
            self._plot(state.log_history, Path(args.output_dir) / PLOT, title=Path(args.output_dir).name)
        except Exception:
            check_place(Path(args.output_dir))
            _logger.warning("The plot of the run could not be drawn; the run is not affected.", exc_info=True)

    def _print_row(self, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Step, the metrics in their columns, time left; a heading from time to time, and once what it means."""
        first = f"step {state.global_step}/{state.max_steps}"
        width = len(f"step {state.max_steps}/{state.max_steps}")
        columns = _fitting(WIDTH - width - _LEFT, streams=self._streams)
        if self._lines == 0:
            meanings = (f"{label}: {meaning}" for _, label, _, meaning in columns)
            print(textwrap.fill("; ".join(meanings) + ".", WIDTH), flush=True)
        if self._lines % _PAGE == 0:
            heads = "".join(label.rjust(size) for _, label, size, _ in columns)
            print(" " * width + heads + "left".rjust(_LEFT), flush=True)
        self._lines += 1
        seconds = (time.perf_counter() - self._began) / max(1, state.global_step - self._first_step)
        left = clock(seconds * (state.max_steps - state.global_step))
        values = "".join(_cell(logs.get(key), size) for key, _, size, _ in columns)
        print(first.ljust(width) + values + left.rjust(_LEFT), flush=True)


def _fitting(room: int, *, streams: bool) -> list[tuple[str, str, int, str]]:
    """The first columns, as many as there is room for."""
    columns = [column for column in _COLUMNS if streams or column[0] != _WAITED]
    ends = accumulate(size for _, _, size, _ in columns)
    return [column for column, end in zip(columns, ends, strict=True) if end <= room]


def _cell(value: float | None, width: int) -> str:
    """A number, right-justified, with three digits or as many as there is room for; blank where there is none."""
    if value is None:
        return " " * width
    whole = [f"{value:.0f}"] if 1000 <= abs(value) < 1e5 else []
    texts = [*whole, f"{value:.3g}", f"{value:.1g}", f"{value:.0e}"]
    return next(text for text in texts if len(text) < width).rjust(width)


def use_progress_lines(trainer: Trainer, plot: Plot) -> None:
    """Put `ProgressLines` in the place of transformers' progress bar or printed dictionaries."""
    # transformers adds one of the two, depending on disable_tqdm.
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
        if match := EVALUATED.fullmatch(key):
            # Of several pass@k the last one is logged for the largest k.
            kind = match["metric"].partition("@")[0]
            found.setdefault(match["name"] or "", {})[kind] = f"{match['metric']} {value:.3g}"
    return [f"{f'eval {name}'.strip()}  {'  '.join(scores.values())}  ({how})" for name, scores in found.items()]


def newest_rows(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the last steps of a log, which a checkpoint keeps: with all of them it would grow with each step."""
    first = log[-_ROWS:][0]["step"] if log else 0
    return [row for row in log if row["step"] >= first]


def whole_log(folder: Path, newest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`newest_rows` of a checkpoint with those before them, from the ``metrics.jsonl`` beside it if it is there."""
    first = newest[0]["step"] if newest else 0
    return [row for row in read_lines(folder.parent / LOG) if row["step"] < first] + newest


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
