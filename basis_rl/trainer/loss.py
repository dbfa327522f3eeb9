"""The terms of the policy's loss that are not TRL's: our own objectives, and KL by estimator and placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from basis_rl.functional.objectives import OF_LOSS_TYPE, Aggregation, Estimator, aggregate, kl_estimate
from basis_rl.objectives import OBJECTIVES, AnyObjective, LossInputs, LossSettings, Objective, objective_name
from basis_rl.trainer.config import BasisConfig
from basis_rl.types import action_mask

Inputs = dict[str, Any]
# TRL's one loss type that logs nothing of how it treats ratios.
SILENT_LOSS_TYPE = "sapo"


class PolicyLoss:
    """What is added to TRL's `_compute_loss` of a micro-batch of B rollouts.

    TRL's method computes TRL's objectives, and only its KL term is replaced if that is not k3 in the loss. For any
    other objective that method gets advantages of 0 (`for_trl`): it still scores the rollouts and gives entropy bonus,
    auxiliary loss and metrics.

    Args:
        objective: what is minimised.
        args: settings of the run.
        accelerator: sums metrics over ranks.
    """

    def __init__(self, objective: AnyObjective, args: BasisConfig, accelerator: Accelerator) -> None:
        self.objective = objective
        self.args = args
        self.accelerator = accelerator
        self.own = objective if isinstance(objective, Objective) else None
        self.kl_in_loss = args.beta != 0.0 and args.kl_placement == "loss"

    @property
    def is_trl_alone(self) -> bool:
        """Whether there is nothing to add."""
        trl_kl = self.args.beta == 0.0 or (self.kl_in_loss and self.args.kl_estimator == "k3")
        return self.own is None and trl_kl

    def row_weight(self, inputs: Inputs) -> float:
        """What TRL's loss of a micro-batch is multiplied by: its share of the rows, where that loss is their mean."""
        by_tokens = OF_LOSS_TYPE[self.args.loss_type] == "token_mean"
        return 1.0 if by_tokens else inputs.get("row_weight", 1.0)

    def for_trl(self, inputs: Inputs) -> Inputs:
        """The micro-batch as TRL's method is to see it."""
        if self.own is None:
            return inputs
        return {**without_old_log_probs(inputs), "advantages": torch.zeros_like(inputs["advantages"])}

    def terms(
        self,
        inputs: Inputs,
        log_probs: Tensor,
        entropy: Tensor,
        masks: Callable[[LossInputs], Tensor],
        accumulation: float | None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The scalar to add to TRL's loss, and metrics, the same on every rank.

        Args:
            inputs: the micro-batch.
            log_probs: ``(B, T)`` of the policy, with gradient, of TRL's one scoring pass; `entropy` likewise.
            entropy: ``(B, T)``.
            masks: TRL's masks of tokens, ``(B, T)`` or ``(B, 1)``, for a given batch.
            accumulation: micro-batches per optimizer step; None in evaluation.
        """
        mask = action_mask(inputs)
        if self.own is None:
            return self._kl_term(inputs, log_probs, OF_LOSS_TYPE[self.args.loss_type], None, accumulation)
        seen = without_old_log_probs(inputs) if self.own.on_policy else inputs
        given = loss_inputs(seen, log_probs, entropy, self.args, self.own)
        outputs = self.own(given)
        factor = masks(given)
        ratio = inputs.get("importance_sampling_ratio")
        if ratio is not None and not self.own.from_rollout:
            factor = factor * ratio
        loss = self._aggregated(inputs, outputs.per_token * factor, outputs.aggregation, accumulation)
        metrics: dict[str, float] = {}
        if self.kl_in_loss:
            # TRL's bias correction multiplies its k3 term by the ratio.
            unbiased = self.args.kl_estimator == "k3" and self.args.use_bias_correction_kl
            ratios = given.ratio if unbiased else None
            kl, metrics = self._kl_term(inputs, log_probs, outputs.aggregation, ratios, accumulation)
            loss = loss + kl
        metrics |= token_means(self.accelerator, {f"objective/{k}": v for k, v in outputs.metrics.items()}, mask)
        if self.args.entropy_coef != 0.0 or self.args.use_adaptive_entropy:
            # TRL logs the policy's loss without the entropy bonus then, and per micro-batch.
            whole = loss.detach() * (1.0 if outputs.aggregation == "token_mean" else accumulation or 1.0)
            metrics["policy_loss"] = self.accelerator.gather(whole).nanmean().item()
        return loss, metrics

    def _kl_term(
        self,
        inputs: Inputs,
        log_probs: Tensor,
        aggregation: Aggregation,
        ratio: Tensor | None,
        accumulation: float | None,
    ) -> tuple[Tensor, dict[str, float]]:
        """``beta * KL`` aggregated like the loss it is added to (REINFORCE++ Eq. 8 for k2), and the metric ``kl``."""
        if not self.kl_in_loss:
            return torch.zeros((), device=log_probs.device), {}
        per_token = kl_estimate(log_probs, inputs["ref_per_token_logps"], cast(Estimator, self.args.kl_estimator))
        if ratio is not None:
            per_token = per_token * ratio
        metrics = token_means(self.accelerator, {"kl": per_token}, action_mask(inputs))
        return self.args.beta * self._aggregated(inputs, per_token, aggregation, accumulation), metrics

    def _aggregated(
        self, inputs: Inputs, per_token: Tensor, aggregation: Aggregation, accumulation: float | None
    ) -> Tensor:
        """The losses ``(B, T)`` of this rank's micro-batch as its share of the step's, as TRL aggregates them."""
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if accumulation is not None:
            # TRL counts the tokens of a generation batch; the loss is that of one optimizer step.
            tokens = tokens * accumulation / self.args.steps_per_generation
        return aggregate(
            per_token,
            action_mask(inputs),
            aggregation,
            accumulation=(accumulation or 1.0) / inputs.get("row_weight", 1.0),
            max_length=self.args.max_completion_length,
            tokens=tokens,
        )


def depending_on_micro_batches(args: BasisConfig, objective: AnyObjective) -> list[str]:
    """The settings with which the result depends on how the rows of a step are divided among its micro-batches."""
    own = isinstance(objective, Objective)
    found = {
        "loss_type bnpo": not own and args.loss_type == "bnpo",
        # What a user's own function does with its rows is not known.
        "an objective of your own": own and objective not in OBJECTIVES.values(),
        f"objective {objective_name(objective)}": isinstance(objective, Objective) and objective.by_micro_batch,
        "entropy_coef": args.entropy_coef != 0.0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile below 1": args.top_entropy_quantile != 1.0,
    }
    return [name for name, is_set in found.items() if is_set]


def loss_inputs(
    inputs: Inputs, log_probs: Tensor, entropy: Tensor, args: BasisConfig, objective: Objective
) -> LossInputs:
    """What an own objective reads of a micro-batch of TRL's, of B rollouts, and of its scoring pass, ``(B, T)``."""
    old = inputs.get("old_per_token_logps")
    old = log_probs.detach() if old is None else old
    sampled = inputs.get("sampling_per_token_logps")
    if objective.from_rollout and sampled is not None:
        old = torch.where(sampled.isnan(), old, sampled)
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=old,
        advantages=inputs["advantages"],
        mask=action_mask(inputs).bool(),
        entropy=entropy,
        settings=LossSettings(
            epsilon_low=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            delta=args.delta,
            max_completion_length=args.max_completion_length,
        ),
    )


def without_old_log_probs(inputs: Inputs) -> Inputs:
    """The batch without the sampling policy's log-probabilities: the present ones take their place, the ratio is 1."""
    return {key: value for key, value in inputs.items() if key != "old_per_token_logps"}


def token_means(accelerator: Accelerator, values: Mapping[str, Tensor], mask: Tensor) -> dict[str, float]:
    """Means over the action tokens of all ranks, of ``(B, T)`` tensors or scalars, the same on every rank."""
    sums = []
    for value in values.values():
        detached = value.detach()
        total = torch.where(mask.bool(), detached, 0.0).sum() if value.ndim else detached
        count = mask.sum() if value.ndim else torch.ones_like(detached)
        sums += [total.double(), count.double()]
    if not sums:
        return {}
    totals = accelerator.reduce(torch.stack(sums), reduction="sum").tolist()
    return {name: total / max(1.0, count) for name, total, count in zip(values, totals[::2], totals[1::2], strict=True)}
