"""What the trainer adds to TRL's loss: GPG, and KL by estimator and placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from basis_rl.functional.kl import Estimator, kl_estimate
from basis_rl.functional.objectives import aggregate

if TYPE_CHECKING:
    from basis_rl.trainer.trainer import BasisTrainer


def without_old_log_probs(inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch without the sampling policy's log-probabilities.

    TRL then takes the present ones in their place: the ratio is 1, nothing is clipped, and the gradient is that of
    ``-A log pi``, which is GPG (Chu et al. 2025, arXiv:2504.02546).
    """
    return {key: value for key, value in inputs.items() if key != "old_per_token_logps"}


@contextmanager
def no_kl(trainer: BasisTrainer) -> Iterator[None]:
    """Within it, TRL's loss has no KL term; what is in the batch (reference log-probabilities) stays."""
    beta, trainer.beta = trainer.beta, 0.0
    try:
        yield
    finally:
        trainer.beta = beta


def kl_loss(trainer: BasisTrainer, inputs: dict[str, Any], log_probs: Tensor) -> Tensor:
    """``beta * KL`` aggregated like the loss it is added to (REINFORCE++ Eq. 8 for k2); logs the metric ``kl``.

    Args:
        trainer: its settings count.
        inputs: the micro-batch.
        log_probs: ``(B, T)`` of the policy, with gradient.
    """
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    estimator = cast(Estimator, trainer.args.kl_estimator)
    per_token = kl_estimate(log_probs, inputs["ref_per_token_logps"], estimator)
    train = trainer.model.training
    accumulation = float(trainer.current_gradient_accumulation_steps) if train else 1.0
    tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    if train:
        tokens = tokens * accumulation / trainer.args.steps_per_generation
    sums = torch.stack([(per_token.detach() * mask).sum(), mask.sum().float()])
    total, count = trainer.accelerator.reduce(sums, reduction="sum").tolist()
    trainer._metrics["train" if train else "eval"]["kl"].append(total / max(1.0, count))
    return trainer.beta * aggregate(
        per_token,
        mask,
        trainer.loss_type,
        accumulation=accumulation,
        max_length=trainer.max_completion_length,
        tokens=tokens,
    )


def old_log_probs(trainer: BasisTrainer, output: dict[str, Any]) -> Tensor:
    """``(B, T)`` log-probabilities of the policy that sampled: TRL's, or of one scoring pass where TRL made none."""
    if "old_per_token_logps" in output:
        found: Tensor = output["old_per_token_logps"]
        return found
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    tokens = output["completion_ids"].shape[1]
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        log_probs, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, tokens, batch_size=trainer.args.per_device_train_batch_size
        )
    scored: Tensor = log_probs
    return scored


def kl_in_reward(trainer: BasisTrainer, output: dict[str, Any]) -> Tensor:
    """``(B, T)`` penalty of each token, ``beta * KL(pi_old || pi_ref)``, coefficient included (REINFORCE++ Eq. 4)."""
    estimator = cast(Estimator, trainer.args.kl_estimator)
    penalty = kl_estimate(old_log_probs(trainer, output), output["ref_per_token_logps"], estimator)
    mask = output["completion_mask"] * output.get("tool_mask", 1)
    sums = torch.stack([(penalty * mask).sum(), mask.sum().float()])
    total, count = trainer.accelerator.reduce(sums, reduction="sum").tolist()
    trainer._metrics["train"]["kl"].append(total / max(1.0, count))
    return trainer.beta * penalty
