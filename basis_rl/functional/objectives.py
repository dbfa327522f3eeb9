"""The parts of a policy loss: KL estimators, importance weights, and how a loss of each token becomes one number."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["rollout_mean", "rollout_sum", "micro_batch_mean", "fixed_length", "token_mean"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)

# Modes of the rollout correction beside TRL's, and the one in which the engine's policy is the old one.
REJECTIONS = ("seq_mean_k1", "seq_mean_k3", "seq_mask_tis")
BYPASS = "bypass"

# How TRL aggregates the loss of each of its loss types.
OF_LOSS_TYPE: dict[str, Aggregation] = {
    "grpo": "rollout_mean",
    "sapo": "rollout_mean",
    "luspo": "rollout_sum",
    "bnpo": "micro_batch_mean",
    "dr_grpo": "fixed_length",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
}


def aggregate(
    per_token: Tensor, mask: Tensor, aggregation: Aggregation, *, accumulation: float, max_length: int, tokens: Tensor
) -> Tensor:
    """The scalar whose sum over the micro-batches of an optimizer step is the loss.

    ::

        rollout_mean       mean over rollouts of the mean over their tokens
        rollout_sum        mean over rollouts of the sum over their tokens
        micro_batch_mean   mean over the tokens of the micro-batch
        fixed_length       sum over tokens / (rollouts * max_length)
        token_mean         sum over tokens / tokens of the whole optimizer step

    What stands outside the mask has no influence, whatever it is, on the value and on the gradient.

    Args:
        per_token: ``(M, T)``.
        mask: ``(M, T)``, 1 on action tokens.
        aggregation: one of the above.
        accumulation: micro-batches of an optimizer step (not for ``token_mean``, whose `tokens` span all of them).
        max_length: tokens that a rollout may have.
        tokens: action tokens of an optimizer step, over this rank's share.
    """
    kept = torch.where(mask.bool(), per_token, 0.0)
    if aggregation == "token_mean":
        return kept.sum() / tokens
    if aggregation == "micro_batch_mean":
        value = kept.sum() / mask.sum().clamp(min=1.0)
    elif aggregation == "fixed_length":
        value = kept.sum() / (per_token.shape[0] * max_length)
    elif aggregation == "rollout_sum":
        value = kept.sum(-1).mean()
    else:
        assert aggregation == "rollout_mean", aggregation
        value = (kept.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    return value / accumulation


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: Estimator) -> Tensor:
    """With ``d = log pi - log pi_ref``: k1 = ``d``, k2 = ``d^2 / 2``, k3 = ``exp(-d) - 1 + d``. Elementwise.

    Estimators of KL(pi || pi_ref) from one sampled token (Schulman, "Approximating KL divergence").

    As a loss only k2 and k3 pull towards the reference: on samples of the policy the expected gradient of k1 is 0, that
    of k2 is the gradient of the reverse KL, that of k3 the gradient of the forward KL (REINFORCE++, App. B.1). In the
    reward all three are values, and k1 is the unbiased one.

    In the loss TRL multiplies k3 by the ratio ``pi / pi_old`` unless ``use_bias_correction_kl`` is False, and so do we,
    so that a TRL configuration trains the same: the value is then unbiased off-policy, and the gradient at the ratio 1
    is ``d grad log pi``, that of k2, not the papers' k3. For theirs set ``use_bias_correction_kl: false``.

    With ratios of a whole rollout (``gspo``, ``luspo``) TRL multiplies by that ratio, and the gradient at the ratio 1
    is neither k2's nor k3's: that of k3, plus ``k3_t`` times the mean of the tokens' ``grad log pi``. ``gspo_token``
    has ratios of tokens in this place, so its KL term is not that of ``gspo``.
    """
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    return torch.exp(-difference) - 1.0 + difference


def importance_weights(
    log_probs: Tensor, sampled: Tensor, mask: Tensor, mode: str, lowest: float | None, highest: float | None
) -> Tensor:
    """``w = pi(y) / pi_rollout(y)``, bounded: ``(B, T)`` of each token, or ``(B, 1)`` of each rollout's product.

    The weights of rollouts that another policy, or another engine, has sampled. Some modes reject rollouts by a mean
    over their tokens, which does not depend on their length as the product does. With ``d_t = log w_t``::

        seq_mean_k1     1 where exp(mean_t d_t), the geometric mean, is within the bounds, else 0 (verl's rollout_rs)
        seq_mean_k3     1 where mean_t (exp(d_t) - 1 - d_t) is, else 0: the k3 estimate of KL(pi_rollout || pi)
        seq_mask_tis    as seq_mean_k1, with w_t in the place of 1 (OpenRLHF, NeMo-RL)
        bypass          1: nothing lies between the policy of the ratios and the engine

    Args:
        log_probs: ``(B, T)`` of the trained policy.
        sampled: ``(B, T)`` of the engine that sampled; NaN (unknown) counts as equal to `log_probs`.
        mask: ``(B, T)``, 1 on action tokens.
        mode: one of these, or ``token_`` or ``sequence_``, then ``truncate`` (weights are clamped into the bounds) or
            ``mask`` (weights outside of them are 0), as TRL's ``vllm_importance_sampling_mode``.
        lowest: bound from below; None is none.
        highest: bound from above.
    """
    difference = ((log_probs - sampled) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence_"):
        difference = difference.sum(dim=-1, keepdim=True)
    weights = difference.exp()
    low = -math.inf if lowest is None else lowest
    high = math.inf if highest is None else highest
    if mode == BYPASS:
        return torch.ones_like(weights[:, :1])
    if mode in REJECTIONS:
        per_token = weights - 1 - difference if mode == "seq_mean_k3" else difference
        known = (mask.bool() & ~sampled.isnan()).sum(dim=-1, keepdim=True)
        mean = per_token.sum(dim=-1, keepdim=True) / known.clamp(min=1)
        bounded = mean if mode == "seq_mean_k3" else mean.exp()
        kept = weights if mode == "seq_mask_tis" else torch.ones_like(mean)
        return torch.where((bounded >= low) & (bounded <= high), kept, 0.0)
    if mode.endswith("_truncate"):
        return weights.clamp(low, high)
    return torch.where((weights < low) | (weights > high), 0.0, weights)
