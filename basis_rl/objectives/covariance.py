"""Objectives against the collapse of entropy: the few tokens whose probability and advantage vary together.

The change of entropy in a step of policy gradient is, to first order, minus the covariance of ``log pi(y_t)`` and
``A_t``. With the means over the action tokens of the micro-batch::

    c_t = (A_t - mean A) (log pi(y_t) - mean log pi)

Cui et al. 2025, arXiv:2505.22617. Both depend on which rollouts share a micro-batch, as verl's do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from basis_rl.objectives.base import LossInputs, LossOutputs, objective

# Of the action tokens of a micro-batch, as in verl.
_SHARE = 2e-4
# Clip-Cov draws among covariances between these.
_LOWEST = 1.0
_HIGHEST = 5.0
# Factor of KL-Cov's penalty.
_PENALTY = 1.0


def _covariances(inputs: LossInputs) -> Tensor:
    """``(M, T)`` of c_t, without gradient; what stands outside the mask means nothing."""
    mask = inputs.mask
    count = mask.sum().clamp(min=1)
    advantages = inputs.token_advantages.expand(mask.shape)
    log_probs = inputs.log_probs.detach()
    centred = [x - torch.where(mask, x, 0.0).sum() / count for x in (advantages, log_probs)]
    return centred[0] * centred[1]


def _largest(values: Tensor, among: Tensor, count: int) -> Tensor:
    """``(M, T)`` bool: the `count` largest of the values `among` which to choose, or all of them."""
    chosen = torch.zeros_like(among)
    count = min(count, int(among.sum()))
    order = torch.where(among, values, -torch.inf).flatten().topk(count).indices
    chosen.view(-1)[order] = True
    return chosen


@objective(token_advantages=True, by_micro_batch=True)
def clip_cov(inputs: LossInputs) -> LossOutputs:
    """PPO's clipped loss, ``L_t = -min(r_t A_t, clip(r_t, 1 - e_low, 1 + e_high) A_t)``, without 0.02 % of the tokens,
    drawn from those with ``1 < c_t < 5`` that are not clipped anyway.

    Clip-Cov; verl's ``clip_cov``. Which are drawn is told by the last digits of their log-probabilities, so that the
    same micro-batch has the same loss. Departure: below 5,000 tokens a micro-batch loses none, where verl takes one.
    Averaged over tokens. Metrics: ``clipped``, the share of tokens with the clipped term; ``dropped``.
    """
    settings = inputs.settings
    advantages = inputs.token_advantages
    free = inputs.ratio * advantages
    clipped = inputs.ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high) * advantages
    found = _covariances(inputs)
    among = inputs.mask & (found > _LOWEST) & (found < _HIGHEST) & ~(clipped < free)
    drawn = (inputs.log_probs.detach().double() * 2.0**16).frac().abs()
    dropped = _largest(drawn, among, int(_SHARE * int(inputs.mask.sum())))
    shares = {"clipped": clipped < free, "dropped": dropped}
    metrics = {name: share.to(inputs.log_probs).detach() for name, share in shares.items()}
    losses = torch.where(dropped, 0.0, -torch.min(free, clipped))
    return LossOutputs(per_token=losses, aggregation="token_mean", metrics=metrics)


@objective(token_advantages=True, by_micro_batch=True)
def kl_cov(inputs: LossInputs) -> LossOutputs:
    """``L_t = -r_t A_t``, and ``|log r_t|`` more for the 0.02 % of the tokens, at least one, with the largest ``c_t``.

    KL-Cov; verl's ``kl_cov``. Averaged over tokens. Metric: ``penalised``, the share of tokens with the penalty.
    """
    count = max(1, int(_SHARE * int(inputs.mask.sum())))
    chosen = _largest(_covariances(inputs), inputs.mask, count)
    penalty = _PENALTY * (inputs.log_probs - inputs.old_log_probs).abs()
    losses = -inputs.ratio * inputs.token_advantages + torch.where(chosen, penalty, 0.0)
    share = chosen.to(inputs.log_probs)
    return LossOutputs(per_token=losses, aggregation="token_mean", metrics={"penalised": share})
