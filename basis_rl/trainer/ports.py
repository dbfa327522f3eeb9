"""What the parts of the trainer see of it: narrow protocols, so that a part imports no trainer and takes a fake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerState

from basis_rl.baselines import Baseline
from basis_rl.run.usage import Spending
from basis_rl.samplers import PromptSampler
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
    def sampler(self) -> PromptSampler: ...

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


class Engine(Protocol):
    """What draws the rollouts of a run with vLLM, as far as requests may be asked ahead."""

    def ask_ahead(self, prompts: list[list[int]], num_generations: int, step: int) -> None: ...

    def last_taken(self) -> tuple[int | None, float]: ...

    def ahead_state(self, wait: bool) -> dict[str, Any] | None: ...

    def set_ahead(self, state: dict[str, Any] | None) -> None: ...


class PrefetchingRun(Run, Protocol):
    """A run whose next generation batch can be asked for ahead."""

    vllm_generation: Engine
    train_dataset: Any
    num_generations: int
    num_iterations: int
    _step: int

    @property
    def stop_on_signal(self) -> Any: ...

    @property
    def selection(self) -> Any: ...

    def epoch_order(self, epoch: int) -> Iterable[int]: ...

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], Any, Any]: ...


class SelectingRun(Run, Protocol):
    """A run whose prompts are drawn by a sampler."""

    train_dataset: Any
    num_generations: int


class GeneratingRun(Run, Protocol):
    """A run that draws and scores rollouts apart from those of its batches."""

    use_vllm: bool
    vllm_generation: Any
    generation_config: Any
    reward_weights: Tensor

    @property
    def spending(self) -> Any: ...

    def rollouts_apart(self, prompts: list[Any]) -> tuple[list[Any], list[list[int]], int]: ...

    def scores_apart(
        self, rows: Sequence[Any], prompts: list[Any], rollouts: list[Any], token_ids: list[list[int]]
    ) -> Tensor: ...


class RefillingRun(GeneratingRun, Protocol):
    """A run whose groups may be drawn again."""

    num_generations: int
    _generation_batch: int
    _pending_extra_logs: dict[str, list[Any]]

    @property
    def selection(self) -> Any: ...

    def score_rollouts(self, rows: Any, prompts: Any, rollouts: Any, token_ids: Any) -> Tensor:
        """``(N, F)`` of all ranks' rollouts; what reward functions log is kept."""


class LossRun(ScoringRun, Protocol):
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

    def replace_metric(self, name: str, value: float) -> None:
        """Put a value in place of the last one that TRL has added to a metric."""


class PublishedRun(RecordedRun, Protocol):
    """A run whose files may go to the Hub."""

    @property
    def record(self) -> Any: ...


class TurnsRun(Run, Protocol):
    """A run whose rollouts may have several turns."""

    generation_config: Any
    _tokenizer: Any
    tools: Any

    @property
    def use_vllm(self) -> bool: ...

    @property
    def vllm_generation(self) -> Any: ...

    @property
    def max_completion_length(self) -> int: ...
