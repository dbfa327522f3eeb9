"""Energies from the forward pass that gives the old log-probabilities, never from full logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.trainer.loss import old_log_probs

if TYPE_CHECKING:
    from basis_rl.trainer.trainer import BasisTrainer


class EnergyRecorder:
    """Lets TRL's fused LM head return ``log sum_v pi(v)^2`` too, and keeps what passes by.

    The head computes it tile by tile, so no ``(B, T, V)`` tensor is ever made. TRL makes the forward pass that is
    needed when it wants the old log-probabilities; where it does not (one update a batch, no vLLM correction), one is
    made here.
    """

    def __init__(self, trainer: BasisTrainer) -> None:
        self.trainer = trainer
        self._chunks: list[Tensor] = []
        self._listening = False
        model = trainer.model
        add_fused_lm_head(
            model.get_base_model() if is_peft_model(model) else model,
            temperature=trainer.temperature,
            cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32,
            outputs=("log_probs", "entropy", "log_sum_sq_probs"),
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, the first scoring pass over the policy is recorded: TRL scores it before the reference model."""
        self._chunks, self._listening = [], True
        try:
            yield
        finally:
            self._listening = False

    def listen(self, model: Any) -> Any:
        """`model`, or for the first scoring pass of a recording a callable that also keeps each chunk's energies."""
        if not self._listening:
            return model
        self._listening = False

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = model(*args, **kwargs)
            if output.log_sum_sq_probs is not None:  # the reference model's head does not compute it
                self._chunks.append(logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp()))
            return output

        return forward

    def energies(self, output: dict[str, Any]) -> Tensor:
        """``(B, T)`` energies of this rank's completions, from TRL's pass or from one of our own."""
        tokens = output["completion_ids"].shape[1]
        if "old_per_token_logps" not in output:
            with self.recording():
                old_log_probs(self.trainer, output)
        result = torch.cat([chunk[:, -tokens:] for chunk in self._chunks])
        self._chunks = []
        return result
