"""Objectives that leave out tokens on which the policy has moved too far from the one that sampled them.

Their ratios are ``r_t = pi(y_t) / mu(y_t)``, with ``mu`` the policy that sampled: the engine's own log-probabilities,
of whatever step (`Objective.from_rollout`). So one ratio corrects both for updates since then and for the engine's
arithmetic, and no other weights are needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from basis_rl.objectives.base import LossInputs, LossOutputs, objective

# Bound of DPPO's weights without `delta`.
_LARGEST_WEIGHT = 20.0
# Factor of IPO's quadratic term.
_QUADRATIC = 1e-3


def _kept(inputs: LossInputs, per_token: Tensor, keep: Tensor) -> LossOutputs:
    """The losses of the tokens that stay, and the metric ``masked``: the share of those that do not."""
    masked = (~keep).to(inputs.log_probs).detach()
    return LossOutputs(
        per_token=torch.where(keep, per_token, 0.0), aggregation="token_mean", metrics={"masked": masked}
    )


@objective(token_advantages=True, from_rollout=True)
def dis(inputs: LossInputs) -> LossOutputs:
    """``L_t = -r_t A_t`` where ``1 - e_low <= r_t <= 1 + e_high``, else 0: double-sided importance sampling.

    SAO (Single-rollout Asynchronous Optimization), arXiv:2607.07508, as its ports have it; the paper could not be read
    in full. Whatever the sign of the advantage, a token outside of the band has no gradient; PPO's clip leaves those
    in that would be brought back. Averaged over tokens. Metric: ``masked``, the share of tokens outside.
    """
    settings = inputs.settings
    ratio = inputs.ratio
    keep = (ratio >= 1 - settings.epsilon_low) & (ratio <= 1 + settings.epsilon_high)
    return _kept(inputs, -ratio * inputs.token_advantages, keep)


def _dppo(inputs: LossInputs, divergence: Tensor) -> LossOutputs:
    """``L_t = -sg(min(r_t, c)) A_t log pi(y_t)``, unless the update would increase a divergence above its bound."""
    settings = inputs.settings
    advantages = inputs.token_advantages
    rises = inputs.log_probs > inputs.old_log_probs
    falls = inputs.log_probs < inputs.old_log_probs
    up = rises & (divergence > settings.epsilon_high)
    down = falls & (divergence > settings.epsilon_low)
    keep = ~torch.where(advantages > 0, up, down)
    largest = _LARGEST_WEIGHT if settings.delta is None else settings.delta
    weight = inputs.ratio.detach().clamp(max=largest)
    return _kept(inputs, -weight * advantages * inputs.log_probs, keep)


@objective(token_advantages=True, from_rollout=True)
def dppo_tv(inputs: LossInputs) -> LossOutputs:
    """``L_t = -sg(min(r_t, c)) A_t log pi(y_t)``, without tokens whose probability is to move on after it has moved by
    more than ``e_high`` (up) or ``e_low`` (down): ``pi(y_t) - mu(y_t)``, the binary total variation.

    DPPO-Binary-TV, arXiv:2602.04879; verl's ``dppo_tv``. A ratio says little where the probability is small: 1e-4
    against 1e-5 is a ratio of 10 and changes nothing. c is `delta`, 20 without. Averaged over tokens. Metric:
    ``masked``, the share of tokens left out.
    """
    return _dppo(inputs, (inputs.log_probs.exp() - inputs.old_log_probs.exp()).abs().detach())


@objective(token_advantages=True, from_rollout=True)
def dppo_kl(inputs: LossInputs) -> LossOutputs:
    """`dppo_tv` with the divergence ``mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))`` of this token against all
    others in place of the total variation.

    DPPO-Binary-KL, arXiv:2602.04879; verl's ``dppo_kl``.
    """
    # Rounding may put one above 0, where the logarithm below is NaN.
    policy = inputs.log_probs.detach().clamp(max=0.0)
    sampled = inputs.old_log_probs.clamp(max=0.0)
    tiny = 1e-8
    others = torch.log((1 - sampled.exp() + tiny) / (1 - policy.exp() + tiny))
    return _dppo(inputs, sampled.exp() * (sampled - policy) + (1 - sampled.exp()) * others)


@objective(token_advantages=True, from_rollout=True)
def ipo(inputs: LossInputs) -> LossOutputs:
    """``L_t = -r_t A_t + 0.001 (log r_t)^2``, without the first term where ``pi(y_t) - mu(y_t)`` is above ``e_high`` or
    below ``-e_low``, whatever the sign of the advantage.

    INTELLECT Policy Optimization, the loss of prime-rl, whose bound is 0.3 on both sides (``epsilon: 0.3``). Averaged
    over tokens. Metric: ``masked``, the share of tokens without the first term.
    """
    settings = inputs.settings
    moved = (inputs.log_probs.exp() - inputs.old_log_probs.exp()).detach()
    keep = (moved <= settings.epsilon_high) & (moved >= -settings.epsilon_low)
    outputs = _kept(inputs, -inputs.ratio * inputs.token_advantages, keep)
    quadratic = _QUADRATIC * (inputs.log_probs - inputs.old_log_probs) ** 2
    return LossOutputs(
        per_token=outputs.per_token + quadratic, aggregation=outputs.aggregation, metrics=outputs.metrics
    )
