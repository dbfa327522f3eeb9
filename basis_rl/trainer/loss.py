"""The policy's loss: TRL's own, or an own objective with TRL's regularisers; KL by estimator and placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from basis_rl.functional.kl import Estimator, kl_estimate
from basis_rl.functional.objectives import OF_LOSS_TYPE, Aggregation, aggregate
from basis_rl.objectives import AnyObjective, LossInputs, LossSettings, Objective
from basis_rl.trainer.ports import LossRun, ScoringRun


class PolicyLoss:
    """The loss of a micro-batch.

    An objective of TRL's is TRL's `_compute_loss`, whose KL term alone is replaced where it is not to be k3 in the
    loss. For an own objective that method is run with advantages of 0: it scores the rollouts once, which is where
    `scored` picks up log-probabilities and entropies with their graph, and gives entropy bonus, auxiliary loss and
    metrics; the objective's losses are added.

    Args:
        run: whose loss it is.
        objective: what is minimised.
    """

    def __init__(self, run: LossRun, objective: AnyObjective) -> None:
        self.run, self.objective = run, objective
        self._recorded: list[tuple[Tensor, Tensor]] | None = None

    def scored(self, log_probs: Tensor, entropy: Tensor | None) -> None:
        """Take note of a scoring pass of the trainer's, ``(B, T)`` each; kept while a loss is computed."""
        if self._recorded is not None:
            assert entropy is not None
            self._recorded.append((log_probs, entropy))

    def __call__(self, trl_loss: Callable[[Any, dict[str, Any]], Tensor], model: Any, inputs: dict[str, Any]) -> Tensor:
        """The scalar to go backward from.

        Args:
            trl_loss: TRL's `_compute_loss`.
            model: the policy as TRL hands it over.
            inputs: the micro-batch.
        """
        run, objective = self.run, self.objective
        if isinstance(objective, Objective):
            return self._own(objective, trl_loss, model, inputs)
        if run.beta == 0.0 or (_kl_in_loss(run) and run.args.kl_estimator == "k3"):
            return trl_loss(model, inputs)
        with no_kl(run):
            loss, log_probs, _ = self._recording(trl_loss, model, inputs)
        if not _kl_in_loss(run):
            return loss
        return loss + kl_loss(run, inputs, log_probs, OF_LOSS_TYPE[run.loss_type])

    def _recording(
        self, trl_loss: Callable[[Any, dict[str, Any]], Tensor], model: Any, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """TRL's loss, with log-probabilities and entropies, ``(B, T)``, of its one scoring pass."""
        self._recorded = []
        try:
            loss = trl_loss(model, inputs)
            ((log_probs, entropy),) = self._recorded
        finally:
            self._recorded = None
        return loss, log_probs, entropy

    def _own(
        self,
        objective: Objective,
        trl_loss: Callable[[Any, dict[str, Any]], Tensor],
        model: Any,
        inputs: dict[str, Any],
    ) -> Tensor:
        run = self.run
        silent = {**without_old_log_probs(inputs), "advantages": torch.zeros_like(inputs["advantages"])}
        with no_kl(run), without_clip_metrics(run):
            regularisers, log_probs, entropy = self._recording(trl_loss, model, silent)
        if objective.on_policy:
            inputs = without_old_log_probs(inputs)
        given = loss_inputs(run, inputs, log_probs, entropy, weights=objective.weighs_rollouts)
        outputs = objective(given)
        losses = outputs.per_token * token_factor(run, inputs, given, weights=not objective.weighs_rollouts)
        loss = aggregated(run, inputs, losses, outputs.aggregation)
        if run.beta != 0.0 and _kl_in_loss(run):
            unbiased = run.args.kl_estimator == "k3" and run.args.use_bias_correction_kl  # as in TRL's KL term
            loss = loss + kl_loss(run, inputs, log_probs, outputs.aggregation, given.ratio if unbiased else None)
        self._log(outputs.metrics, given.mask, loss, outputs.aggregation)
        return loss + regularisers

    def _log(self, metrics: dict[str, Tensor], mask: Tensor, loss: Tensor, aggregation: Aggregation) -> None:
        run = self.run
        sums = [s for value in metrics.values() for s in (_sum_of(value.detach(), mask), _count_of(value, mask))]
        if sums:
            totals = run.accelerator.reduce(torch.stack(sums), reduction="sum").tolist()
            for name, total, count in zip(metrics, totals[::2], totals[1::2], strict=True):
                run.log_metric(f"objective/{name}", total / max(1.0, count))
        if run.args.entropy_coef != 0.0 or run.args.use_adaptive_entropy:  # TRL logs the loss without the bonus then
            whole = loss.detach() * (1.0 if aggregation == "token_mean" else _accumulation(run))
            run.replace_metric("policy_loss", run.accelerator.gather(whole).nanmean().item())


def loss_inputs(
    run: LossRun, inputs: dict[str, Any], log_probs: Tensor, entropy: Tensor, *, weights: bool
) -> LossInputs:
    """What an own objective reads of a micro-batch of TRL's, of B rollouts, and of its scoring pass, ``(B, T)``."""
    old = inputs.get("old_per_token_logps")
    old = log_probs.detach() if old is None else old
    sampled, ratio = inputs.get("sampling_per_token_logps"), inputs.get("importance_sampling_ratio")
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=old,
        rollout_log_probs=None if sampled is None else torch.where(sampled.isnan(), old, sampled),
        rollout_weights=ratio.expand(log_probs.shape) if weights and ratio is not None else None,
        advantages=inputs["advantages"],
        mask=action_mask(inputs).bool(),
        entropy=entropy,
        settings=LossSettings(
            epsilon_low=run.epsilon_low,
            epsilon_high=run.epsilon_high,
            delta=run.args.delta,
            max_completion_length=run.max_completion_length,
        ),
    )


def token_factor(run: LossRun, inputs: dict[str, Any], given: LossInputs, *, weights: bool) -> Tensor:
    """``(B, T)`` or ``(B, 1)`` by which TRL multiplies the losses of any objective: two masks, and rollout weights."""
    factor = torch.ones_like(given.log_probs[:, :1])
    if run.top_entropy_quantile < 1.0:
        factor = factor * run.get_high_entropy_mask(given.entropy, action_mask(inputs), 1 - run.top_entropy_quantile)
    if run.off_policy_mask_threshold is not None:
        factor = factor * run.get_off_policy_mask(
            advantages=given.token_advantages,
            per_token_logps=given.log_probs,
            sampling_per_token_logps=inputs.get("sampling_per_token_logps", given.old_log_probs),
            mask=action_mask(inputs),
            off_policy_threshold=run.off_policy_mask_threshold,
        )
    ratio = inputs.get("importance_sampling_ratio")
    return factor * ratio if weights and ratio is not None else factor


def action_mask(inputs: dict[str, Any]) -> Tensor:
    """``(B, T)``, 1 on the tokens that the policy sampled: no padding, no output of tools."""
    mask: Tensor = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return mask


def without_old_log_probs(inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch without the sampling policy's log-probabilities: the present ones take their place, the ratio is 1."""
    return {key: value for key, value in inputs.items() if key != "old_per_token_logps"}


@contextmanager
def no_kl(run: LossRun) -> Iterator[None]:
    """Within it, TRL's loss has no KL term; what is in the batch (reference log-probabilities) stays."""
    beta, run.beta = run.beta, 0.0
    try:
        yield
    finally:
        run.beta = beta


@contextmanager
def without_clip_metrics(run: LossRun) -> Iterator[None]:
    """Within it, TRL's loss is ``sapo``, the only one that logs nothing of how it treats ratios."""
    loss_type, run.loss_type = run.loss_type, "sapo"
    try:
        yield
    finally:
        run.loss_type = loss_type


def aggregated(run: LossRun, inputs: dict[str, Any], per_token: Tensor, aggregation: Aggregation) -> Tensor:
    """The losses ``(B, T)`` of this rank's micro-batch as its share of the optimizer step's, as TRL aggregates them."""
    tokens = inputs["num_items_in_batch"].clamp(min=1.0) / run.accelerator.num_processes
    if run.model.training:  # the number is that of a generation batch
        tokens = tokens * run.current_gradient_accumulation_steps / run.args.steps_per_generation
    return aggregate(
        per_token,
        action_mask(inputs),
        aggregation,
        accumulation=_accumulation(run),
        max_length=run.max_completion_length,
        tokens=tokens,
    )


def _accumulation(run: LossRun) -> float:
    return float(run.current_gradient_accumulation_steps) if run.model.training else 1.0


def _kl_in_loss(run: LossRun) -> bool:
    return run.args.kl_placement == "loss"


def _sum_of(value: Tensor, mask: Tensor) -> Tensor:
    return (torch.where(mask.bool(), value, 0.0).sum() if value.ndim else value).double()


def _count_of(value: Tensor, mask: Tensor) -> Tensor:
    return (mask.sum() if value.ndim else torch.ones_like(value)).double()


def _log_kl(run: LossRun, per_token: Tensor, mask: Tensor) -> None:
    """Log the mean of ``(B, T)`` over the action tokens of all ranks as ``kl``."""
    sums = torch.stack([_sum_of(per_token.detach(), mask), _count_of(per_token, mask)])
    total, count = run.accelerator.reduce(sums, reduction="sum").tolist()
    run.log_metric("kl", total / max(1.0, count))


def kl_loss(
    run: LossRun, inputs: dict[str, Any], log_probs: Tensor, aggregation: Aggregation, ratio: Tensor | None = None
) -> Tensor:
    """``beta * KL`` aggregated like the loss it is added to (REINFORCE++ Eq. 8 for k2); logs the metric ``kl``.

    Args:
        run: its settings count.
        inputs: the micro-batch.
        log_probs: ``(B, T)`` of the policy, with gradient.
        aggregation: of the loss.
        ratio: ``(B, T)`` by which each token's estimate is multiplied, None for 1.
    """
    per_token = kl_estimate(log_probs, inputs["ref_per_token_logps"], cast(Estimator, run.args.kl_estimator))
    if ratio is not None:
        per_token = per_token * ratio
    _log_kl(run, per_token, action_mask(inputs))
    return run.beta * aggregated(run, inputs, per_token, aggregation)


def old_log_probs(run: ScoringRun, output: dict[str, Any]) -> Tensor:
    """``(B, T)`` log-probabilities of the policy that sampled: TRL's, or of one scoring pass where TRL made none."""
    if "old_per_token_logps" in output:
        found: Tensor = output["old_per_token_logps"]
        return found
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    tokens = output["completion_ids"].shape[1]
    with torch.no_grad(), disable_gradient_checkpointing(run.model, run.args.gradient_checkpointing_kwargs):
        log_probs, _, _ = run._get_per_token_logps_and_entropies(
            run.model, ids, mask, tokens, batch_size=run.args.per_device_train_batch_size
        )
    scored: Tensor = log_probs
    return scored


def kl_in_reward(run: LossRun, output: dict[str, Any]) -> Tensor | None:
    """``(B, T)`` penalty of each token, ``beta * KL(pi_old || pi_ref)``, coefficient included (REINFORCE++ Eq. 4).

    None where no KL penalty is placed in the reward. Logs the metric ``kl``.
    """
    if run.beta == 0.0 or _kl_in_loss(run):
        return None
    estimator = cast(Estimator, run.args.kl_estimator)
    penalty = kl_estimate(old_log_probs(run, output), output["ref_per_token_logps"], estimator)
    _log_kl(run, penalty, action_mask(output))
    return run.beta * penalty
