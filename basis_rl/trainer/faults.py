"""What may go wrong in a long run, and ends it or not: signals to stop, gradients that are not finite."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from basis_rl.trainer.trainer import BasisTrainer

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class NonFiniteGradients(RuntimeError):
    """Too many optimizer steps in a row had gradients that are not finite. The weights are those before them."""


class StopOnSignal(TrainerCallback):
    """SIGTERM or SIGUSR1 (Slurm's ``--signal``): all ranks finish the step, write a checkpoint and stop.

    The ranks agree at each step's end, so that none of them waits for another. A second signal kills at once.
    """

    def __init__(self, trainer: BasisTrainer) -> None:
        self.trainer = trainer
        self.asked = False
        self.stopped = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it the signals are caught, which the main thread can do; in another one nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        asked = torch.tensor([float(self.asked)], device=self.trainer.accelerator.device)
        if float(self.trainer.accelerator.reduce(asked, reduction="sum")) > 0:
            self.stopped = True
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True


class FiniteGradients:
    """Steps whose gradient is not finite are skipped: no weight, no moment of the optimizer is touched.

    The norm is that of the gradient averaged over ranks, so all ranks decide alike. Metric
    ``gradient/skipped_steps``: how many steps of the run were skipped.
    """

    def __init__(self, trainer: BasisTrainer) -> None:
        self.trainer = trainer
        self.skipped = 0
        self.in_a_row = 0

    def check(self, model: torch.nn.Module, grad_norm: float) -> None:
        """Drop the gradients if their norm is not finite.

        Raises:
            NonFiniteGradients: for the ``max_nonfinite_steps``-th time in a row.
        """
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return
        for parameter in model.parameters():
            parameter.grad = None  # optimizers pass over parameters without one
        self.skipped += 1
        self.in_a_row += 1
        self.trainer._metrics["train"]["gradient/skipped_steps"].append(float(self.skipped))
        if self.in_a_row >= self.trainer.args.max_nonfinite_steps:
            raise NonFiniteGradients(
                f"{self.in_a_row} steps in a row (step {self.trainer.state.global_step + 1} is the last) had gradients "
                "that are not finite. They were skipped; the weights are those before them, in the newest checkpoint. "
                "Look at the learning rate, the precision (bf16 rather than fp16) and the advantages' metrics."
            )
