"""What the parts of the trainer see of it: narrow protocols, so that a part imports no trainer and takes a fake."""

from __future__ import annotations

from typing import Any, Protocol

from accelerate import Accelerator
from transformers import TrainerState

from basis_rl.trainer.config import BasisConfig


class Run(Protocol):
    """What every part may use of the run it belongs to."""

    @property
    def accelerator(self) -> Accelerator: ...

    @property
    def args(self) -> BasisConfig: ...

    @property
    def state(self) -> TrainerState: ...

    @property
    def model(self) -> Any: ...

    def log_metric(self, name: str, value: float) -> None:
        """Add a value to a metric of the mode (training or evaluation) that the model is in; the log has their mean."""
