"""One line a log on the terminal, every metric in a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from basis_rl.artefacts import read_lines, write_whole

_FILE = "metrics.jsonl"
_SHOWN = {
    "reward": "reward",
    "loss": "loss",
    "entropy": "entropy",
    "kl": "kl",
    "completions/mean_length": "length",
    "baseline/mse_to_reward": "(r-b)²",
    "baseline/beta": "beta",
    "advantages/zero": "A=0",
}


class ProgressLines(TrainerCallback):
    """Prints step, the main metrics, rate and time left; appends all metrics to ``metrics.jsonl`` in `output_dir`.

    Takes the place of transformers' progress bar, which prints every metric in one line of a thousand characters.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began, self._first_step = time.perf_counter(), state.global_step
        if state.is_world_process_zero and args.output_dir:
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
        with (Path(args.output_dir) / _FILE).open("a") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        shown = [f"{label} {logs[key]:.4g}" for key, label in _SHOWN.items() if logs.get(key) is not None]
        shown += [f"{key} {logs[key]:.4g}" for key in ("eval_reward",) if logs.get(key) is not None]
        if shown:
            print(f"step {state.global_step}/{state.max_steps}  {'  '.join(shown)}  {self._pace(state)}", flush=True)

    def _pace(self, state: TrainerState) -> str:
        done = state.global_step - self._first_step
        seconds = (time.perf_counter() - self._began) / max(1, done)
        left = int(seconds * (state.max_steps - state.global_step))
        return f"{seconds:.2f} s/step, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def _forget_after(path: Path, step: int) -> None:
    """Drop what an earlier run in the same folder logged after `step`: all of it, unless this one resumes."""
    if not path.is_file():
        return
    kept = [json.dumps(row) + "\n" for row in read_lines(path) if row["step"] <= step and step]
    write_whole(path, "".join(kept))
