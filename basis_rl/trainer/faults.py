"""What may end a long run, or not: signals to stop, gradients that are not finite."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from basis_rl.run.errors import NonFiniteGradients, StopAsked
from basis_rl.trainer.ports import Run

STOP_FILE = "STOP"
_SAME_SIGNAL = 5.0
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopOnSignal(TrainerCallback):
    """SIGTERM, SIGUSR1, Ctrl-C or a file ``STOP`` in ``output_dir``: all ranks finish the step, save it and stop.

    The ranks agree at each step's end, so that none of them waits for another. A second signal, some
    seconds later, kills at once (launchers often send each one twice). The file
    is for launchers that kill their processes some seconds after a SIGTERM (torchrun and accelerate: 30), which a long
    step outlasts; it is removed when the run stops.
    """

    def __init__(self, trainer: Run) -> None:
        self.trainer = trainer
        self.asked: float | None = None
        self.stopped = False
        self._interrupts = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it the signals are caught, which the main thread can do; in another one nothing changes."""
        self.asked, self.stopped = None, False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within it a signal raises `StopAsked` at once, and so does one that came before; in the main thread only.

        For waits that may be longer than what a cluster's scheduler gives: on a server that answers or comes back.
        """
        if self._interrupts or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._interrupts = True
        try:
            if self.asked is not None:
                raise StopAsked
            yield
        finally:
            self._interrupts = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked is not None and now - self.asked > _SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = self.asked or now
        if self._interrupts:
            raise StopAsked

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:  # one that an earlier run was too late to see
            (Path(str(args.output_dir)) / STOP_FILE).unlink(missing_ok=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        file = Path(str(args.output_dir)) / STOP_FILE
        told = self.asked is not None or (self.trainer.accelerator.is_main_process and file.exists())
        asked = torch.tensor([float(told)], device=self.trainer.accelerator.device)
        if float(self.trainer.accelerator.reduce(asked, reduction="sum")) > 0:
            self.stopped = True
            if self.trainer.accelerator.is_main_process:
                file.unlink(missing_ok=True)
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True


class FiniteGradients:
    """Steps whose gradient is not finite are skipped: no weight, no moment of the optimizer is touched.

    DeepSpeed steps before it tells the norm, and leaves such a step out by itself (0.19, ZeRO-3). If it has applied
    one, the weights are lost and the run ends at once.

    The norm is that of the gradient averaged over ranks, so all ranks decide alike. Metric
    ``gradient/skipped_steps``: how many steps of the run were skipped.
    """

    def __init__(self, trainer: Run) -> None:
        self.trainer = trainer
        self.skipped = 0
        self.in_a_row = 0

    def check(self, model: Any, grad_norm: Any) -> None:
        """Drop the gradients if their norm is not finite.

        Raises:
            NonFiniteGradients: for the ``max_nonfinite_steps``-th time in a row.
        """
        finite = grad_norm is None or (math.isfinite(float(grad_norm)) and float(grad_norm) >= 0)  # DeepSpeed's -1
        if hasattr(model, "was_step_applied"):
            applied = bool(model.was_step_applied())
            if applied and not finite:
                raise NonFiniteGradients(
                    f"The gradients of step {self.trainer.state.global_step + 1} are not finite, and DeepSpeed has "
                    "applied them. Go on from the newest checkpoint, with a lower learning rate or other data."
                )
            finite = applied
        if finite:
            self.in_a_row = 0
            return
        for parameter in model.parameters():
            parameter.grad = None  # optimizers pass over parameters without one
        self.skipped += 1
        self.in_a_row += 1
        self.trainer.log_metric("gradient/skipped_steps", float(self.skipped))
        if self.in_a_row >= self.trainer.args.max_nonfinite_steps:
            raise NonFiniteGradients(
                f"{self.in_a_row} steps in a row (step {self.trainer.state.global_step + 1} is the last) had gradients "
                "that are not finite. They were skipped; the weights are those before them, in the newest checkpoint. "
                "Look at the learning rate, the precision (bf16 rather than fp16) and the advantages' metrics."
            )

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])
