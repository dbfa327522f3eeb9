"""Rollouts of an engine that is not the trained policy: how far it is away, and the weights that correct for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor

from basis_rl.functional.objectives import BYPASS, importance_weights
from basis_rl.trainer.config import BasisConfig
from basis_rl.types import action_mask

Output = dict[str, Any]
_logger = logging.getLogger(__name__)
# A logarithm of weights above which their squares would lose all others.
_LARGEST = 40.0
# Effective rollouts of a batch, as a share of all, below which a run is warned.
_SMALLEST_SAMPLE = 0.1


def rollout_mismatch(accelerator: Accelerator, output: Output) -> dict[str, float]:
    """How far the engine that sampled is from the trained policy; empty without both log-probabilities (vLLM has them).

    With ``d_t = log pi_theta(y_t) - log pi_rollout(y_t)`` on action tokens:

    - ``rollout/kl``: mean of ``exp(d_t) - 1 - d_t``, the k3 estimate of KL(rollout || trained);
    - ``rollout/log_ppl_gap``: mean over sequences of ``|mean_t d_t|`` (Optimal Token Baseline, Eq. 68);
    - ``rollout/ess``: effective sample size of the sequences, ``(sum_i w_i)^2 / (N sum_i w_i^2)`` with the weights
      ``w_i = exp(sum_t d_t)`` before any bound: 1 if all are alike, 1 / N if one outweighs all others (2602.17616);
    - ``rollout/masked``: share of sequences that the importance correction silenced, every weight 0.

    Tokens whose log-probability the engine does not tell (NaN) are left out; all but the last are NaN if none is left.
    """
    sampled = output.get("sampling_per_token_logps")
    if sampled is None or "old_per_token_logps" not in output:
        return {}
    mask = action_mask(output).bool() & ~sampled.isnan()
    difference = torch.where(mask, output["old_per_token_logps"] - sampled, 0.0).double()
    tokens = mask.sum(dim=1)
    gap = difference.sum(dim=1).abs() / tokens.clamp(min=1)
    weight = torch.where(tokens > 0, difference.sum(dim=1).clamp(-_LARGEST, _LARGEST).exp(), 0.0)
    sums = [(difference.exp() - 1 - difference).sum(), tokens.sum(), gap.sum(), (tokens > 0).sum()]
    sums += [weight.sum(), (weight**2).sum()]
    weights = rollout_weights(output)
    if weights is not None:
        sums.append((((weights * mask) == 0).all(dim=1) & (tokens > 0)).sum())
    kl, count, gaps, sequences, whole, squares, *masked = accelerator.reduce(
        torch.stack([value.double() for value in sums]), reduction="sum"
    ).tolist()
    found = {"rollout/kl": kl / count if count else math.nan}
    found["rollout/log_ppl_gap"] = gaps / sequences if sequences else math.nan
    found["rollout/ess"] = whole**2 / (sequences * squares) if sequences else math.nan
    if masked:
        found["rollout/masked"] = masked[0] / max(1.0, sequences)
    return found


def correction_weights(args: BasisConfig, inputs: Output, log_probs: Tensor) -> Tensor:
    """`importance_weights`, ``(B, T)`` or ``(B, 1)``, by the settings; `log_probs` are the policy's."""
    mask = action_mask(inputs)
    bounds = (args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max)
    mode = args.vllm_importance_sampling_mode
    return importance_weights(log_probs, inputs["sampling_per_token_logps"], mask, mode, *bounds)


class RolloutCorrection:
    """The correction of vLLM's rollouts where the loss's own pass gives the log-probabilities that it needs.

    Where a generation batch serves one optimizer step only, the policy that the loss scores is the one that sampled,
    and TRL's separate scoring pass would compute the same once more. With ``bypass`` no such policy is asked.

    Args:
        args: the correction's settings.
    """

    def __init__(self, args: BasisConfig) -> None:
        self.args = args

    def add(self, inputs: Sequence[Output], log_probs: Tensor, batch: Sequence[Output]) -> Output | None:
        """Put a micro-batch's weights, and with ``bypass`` its old log-probabilities, where the loss looks for them.

        Args:
            inputs: the micro-batch, and the copy of it that TRL's loss reads, if that is another one.
            log_probs: ``(B, T)`` of the loss's pass.
            batch: the micro-batches of the generation batch.

        Returns:
            At the last micro-batch of a generation batch, that batch as if it had been scored before; else None.
        """
        first = inputs[0]
        # A micro-batch that comes again (num_iterations) counts once.
        is_new = "scored_logps" not in first
        scored = log_probs.detach()
        weights = correction_weights(self.args, first, scored)
        for each in inputs:
            each["importance_sampling_ratio"] = weights
        if is_new:
            first["scored_logps"] = scored
            if self.args.vllm_importance_sampling_mode == BYPASS:
                sampled = first["sampling_per_token_logps"]
                first["old_per_token_logps"] = torch.where(sampled.isnan(), scored, sampled)
        if not is_new or any("scored_logps" not in each for each in batch):
            return None
        names = {"completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps", "scored_logps"}
        names = (names | {"importance_sampling_ratio"}) & set(first)
        whole = {name: torch.cat([each[name][: each.get("real_rows")] for each in batch]) for name in names}
        return {**whole, "old_per_token_logps": whole["scored_logps"]}


def correction_metrics(accelerator: Accelerator, output: Output) -> dict[str, float]:
    """TRL's ``sampling/*`` metrics of a scored generation batch: differences of log-probabilities, and weights.

    Tokens without a log-probability of the engine (NaN) have weight 1 and no difference. If a rank has none at all,
    every metric is NaN, where TRL's would show perfect agreement; a rank without tokens counts nothing.
    """
    mask = action_mask(output).bool()
    difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs()[mask]
    weights = output["importance_sampling_ratio"]
    weights = weights.flatten() if weights.shape[1] == 1 and mask.shape[1] != 1 else weights.expand(mask.shape)[mask]
    difference = difference[~difference.isnan()]
    if not len(difference):
        difference = weights = torch.full((1,), torch.nan, device=mask.device)
    counts = [torch.tensor(len(values), device=mask.device) for values in (difference, weights)]
    local = [difference.max(), weights.min(), weights.max(), difference.sum(), weights.sum(), *counts]
    mine = torch.stack([value.double() for value in local])
    if not mask.any():
        mine = mine.new_tensor([-math.inf, math.inf, -math.inf, 0, 0, 0, 0])
    each = accelerator.gather(mine[None])
    names = [f"sampling_logp_difference/{name}" for name in ("mean", "max")]
    names += [f"importance_sampling_ratio/{name}" for name in ("min", "mean", "max")]
    sums = each[:, 3:].sum(dim=0)
    means = sums[:2] / sums[2:]
    values = (means[0], each[:, 0].max(), each[:, 1].min(), means[1], each[:, 2].max())
    return {f"sampling/{name}": float(value) for name, value in zip(names, values, strict=True)}


class RatioAlarm:
    """Warns once when the mean weight of vLLM's rollouts leaves 0.5 to 2, as it does if the engine has another policy,
    and once when few of them outweigh all others."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(self, mean: float) -> None:
        """`mean`: ``sampling/importance_sampling_ratio/mean`` of a generation batch."""
        if not 0.5 <= mean <= 2.0:
            self._warn(
                f"The mean weight of the rollouts (sampling/importance_sampling_ratio/mean) is {mean:.3g}, which is "
                "not between 0.5 and 2: the engine that samples has other probabilities than the policy that is "
                "trained. Look at rollout/kl and rollout/masked, and at the server's --dtype.",
                "mean",
            )

    def check_sample_size(self, share: float) -> None:
        """`share`: ``rollout/ess`` of a generation batch."""
        if share < _SMALLEST_SAMPLE:
            self._warn(
                f"The effective sample size of a batch (rollout/ess) is {share:.2g} of its rollouts: a few of them "
                "outweigh all others, before any bound of the weights. The policy has moved too far from the one that "
                "sampled; lower max_staleness, num_iterations, steps_per_generation or learning_rate.",
                "sample size",
            )

    def _warn(self, message: str, kind: str) -> None:
        if kind not in self._warned and PartialState().is_main_process:
            _logger.warning(message)
        self._warned.add(kind)


def rollout_weights(output: dict[str, Any]) -> Tensor | None:
    """``(B, T)`` weights ``pi_theta / pi_rollout`` as the loss uses them: truncated or masked by TRL's options."""
    weights: Tensor | None = output.get("importance_sampling_ratio")
    return None if weights is None else weights.expand(output["completion_ids"].shape)
