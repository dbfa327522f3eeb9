"""What the parts of the trainer see of it: narrow protocols, so that a part imports no trainer and takes a fake."""

from __future__ import annotations

from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor
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


class LossRun(Run, Protocol):
    """What the loss uses besides: TRL's settings of it, two masks of TRL's, and its scoring pass."""

    beta: float
    loss_type: str

    @property
    def epsilon_low(self) -> float: ...

    @property
    def epsilon_high(self) -> float: ...

    @property
    def max_completion_length(self) -> int: ...

    @property
    def current_gradient_accumulation_steps(self) -> int: ...

    @property
    def top_entropy_quantile(self) -> float: ...

    @property
    def off_policy_mask_threshold(self) -> float | None: ...

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor: ...

    def get_off_policy_mask(
        self,
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor: ...

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any: ...

    def replace_metric(self, name: str, value: float) -> None:
        """Put a value in place of the last one that TRL has added to a metric."""
