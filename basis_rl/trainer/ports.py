"""What the parts of the trainer see of it: narrow protocols, so that a part imports no trainer and takes a fake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from accelerate import Accelerator
from transformers import TrainerState

from basis_rl.baselines import Baseline
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.spending import Spending


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


class ScoringRun(Run, Protocol):
    """A run whose policy can be asked for log-probabilities."""

    @property
    def temperature(self) -> float: ...

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any: ...


class LearningRun(ScoringRun, Protocol):
    """A run beside whose policy something else is trained."""

    @property
    def processing_class(self) -> Any: ...


class BufferedRun(Run, Protocol):
    """A run with TRL's counters: micro-batches done, rollouts in use, values of metrics since the last log."""

    _step: int
    _buffered_inputs: Any
    _metrics: dict[str, Any]

    @property
    def num_iterations(self) -> int: ...


class Stateful(Protocol):
    """A part with state of its own, which a checkpoint holds for each rank."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings from which `load_state_dict` restores the part exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result."""


class Stop(Protocol):
    """Whether a signal has ended the run."""

    @property
    def stopped(self) -> bool: ...


class RecordedRun(Run, Protocol):
    """What the record of a run tells (`basis_rl.trainer.facts`)."""

    @property
    def baseline(self) -> Baseline: ...

    @property
    def reward_funcs(self) -> list[Any]: ...

    @property
    def train_dataset(self) -> Any: ...

    @property
    def spending(self) -> Spending: ...

    @property
    def stop_on_signal(self) -> Stop: ...

    @property
    def hub_model_id(self) -> str | None: ...

    @property
    def is_deepspeed_enabled(self) -> bool: ...
