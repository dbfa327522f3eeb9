"""What the forward pass that gives the old log-probabilities also tells: kept as it passes by, never computed twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.trainer.loss import old_log_probs
from basis_rl.trainer.ports import ScoringRun


class ScoringPass(ABC):
    """Keeps something of TRL's scoring pass over the policy.

    TRL makes that pass when it wants the old log-probabilities; where it does not (one update a batch, no vLLM
    correction), one is made here.
    """

    def __init__(self, trainer: ScoringRun) -> None:
        self.trainer = trainer
        self._chunks: list[Tensor] = []
        self._listening = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, the first scoring pass over the policy is recorded: TRL scores it before the reference model."""
        self._chunks, self._listening = [], True
        try:
            yield
        finally:
            self._listening = False

    def listen(self, model: Any) -> Any:
        """`model`, or for the first scoring pass of a recording a callable that also keeps what is wanted."""
        if not self._listening:
            return model
        self._listening = False
        return lambda *args, **kwargs: self._record(model, *args, **kwargs)

    @abstractmethod
    def _record(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """What `model` returns; what is wanted of it goes into ``self._chunks``."""

    def take(self, output: dict[str, Any]) -> Tensor:
        """``(B, ...)`` of this rank's completions, from TRL's pass or from one of our own."""
        if "old_per_token_logps" not in output:
            with self.recording():
                old_log_probs(self.trainer, output)
        tokens = output["completion_ids"].shape[1]
        result = torch.cat([self._of_completion(chunk, tokens) for chunk in self._chunks])
        self._chunks = []
        return result

    def _of_completion(self, chunk: Tensor, tokens: int) -> Tensor:
        return chunk[:, -tokens:]


class EnergyRecorder(ScoringPass):
    """Lets TRL's fused LM head return ``log sum_v pi(v)^2`` too, and keeps ``(B, T)`` energies of what passes by.

    The head computes it tile by tile, so no ``(B, T, V)`` tensor is ever made.
    """

    def __init__(self, trainer: ScoringRun) -> None:
        super().__init__(trainer)
        model = trainer.model
        add_fused_lm_head(
            model.get_base_model() if is_peft_model(model) else model,
            temperature=trainer.temperature,
            cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32,
            outputs=("log_probs", "entropy", "log_sum_sq_probs"),
        )

    def _record(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        output = model(*args, **kwargs)
        if output.log_sum_sq_probs is not None:  # the reference model's head does not compute it
            self._chunks.append(logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp()))
        return output


class HiddenStates(ScoringPass):
    """The policy's last hidden states before each completion token, ``(B, T, H)``."""

    def _record(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        backbone = (policy.get_base_model() if is_peft_model(policy) else policy).base_model
        hook = backbone.register_forward_hook(lambda _, __, found: self._chunks.append(found.last_hidden_state))
        try:
            return model(*args, **kwargs)
        finally:
            hook.remove()

    def _of_completion(self, chunk: Tensor, tokens: int) -> Tensor:
        return chunk[:, -tokens - 1 : -1]
