"""Energies from the forward pass that gives the old log-probabilities, never from full logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from trl.trainer.utils import add_fused_lm_head

from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.trainer.scoring import ScoringPass

if TYPE_CHECKING:
    from basis_rl.trainer.trainer import BasisTrainer


class EnergyRecorder(ScoringPass):
    """Lets TRL's fused LM head return ``log sum_v pi(v)^2`` too, and keeps ``(B, T)`` energies of what passes by.

    The head computes it tile by tile, so no ``(B, T, V)`` tensor is ever made.
    """

    def __init__(self, trainer: BasisTrainer) -> None:
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
