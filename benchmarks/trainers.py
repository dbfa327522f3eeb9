"""What the benchmarks of whole steps share: a clock, a reward that costs nothing, trainers that print nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from basis_rl import BasisTrainer


class StepClock(TrainerCallback):
    """What the clock says when each optimizer step begins. From one to the next is a whole step: generation, updates,
    the optimizer, and all that trainer and callbacks do around them, which TRL's own ``step_time`` leaves out in part.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.began = now, list[float]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began.append(self.now())


def quiet(trainer: BasisTrainer) -> BasisTrainer:
    """Without progress bar and printed logs."""
    for bar in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(bar)
    return trainer


def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that costs nothing: 1 where the sum of a completion's token ids is odd, else 0."""
    return [float(sum(ids) % 2) for ids in completion_ids]
