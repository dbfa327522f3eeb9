"""The objectives that TRL does not have."""

from __future__ import annotations

import torch

from basis_rl.objectives.base import LossInputs, LossOutputs, objective


@objective(token_advantages=True)
def gspo_token(inputs: LossInputs) -> LossOutputs:
    """``L_t = -min(s_t A_t, clip(s_t, 1 - e_low, 1 + e_high) A_t)``: GSPO for an advantage of each token.

    GSPO-token, Zheng et al. 2025, arXiv:2507.18071, Eqs. 13 and 14.

    ``s_t = sg(s) pi(y_t) / sg(pi(y_t))`` with the rollout's ratio ``s = exp(mean_t (log pi - log pi_old))``, the mean
    over its tokens, and sg for stopped gradients: each token is clipped by the ratio of the whole rollout, and its
    gradient passes through its own probability alone. GSPO's passes through s, so that it multiplies the mean of the
    ``A_t``, and what they tell apart is lost; with one advantage a rollout both have the same value and gradient.
    Averaged over tokens, then over rollouts. With `delta` the unclipped ``s_t`` is bounded by it, as in TRL's losses.

    Metric: ``clipped``, the share of tokens with the clipped term.
    """
    length = inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)
    log_ratio = ((inputs.log_probs - inputs.old_log_probs) * inputs.mask).sum(dim=1, keepdim=True) / length
    ratio = torch.exp(log_ratio.detach() + inputs.log_probs - inputs.log_probs.detach())
    settings = inputs.settings
    clipped = ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high) * inputs.token_advantages
    free = (ratio if settings.delta is None else ratio.clamp(max=settings.delta)) * inputs.token_advantages
    share = (clipped < free).to(inputs.log_probs).detach()
    return LossOutputs(per_token=-torch.min(free, clipped), aggregation="rollout_mean", metrics={"clipped": share})


@objective(token_advantages=False)
def gmpo(inputs: LossInputs) -> LossOutputs:
    """``L = -A exp(mean_t l_t)`` for all tokens of a rollout: the geometric mean of its clipped ratios.

    GMPO, Zhao et al. 2025, arXiv:2507.20673; verl's ``geo_mean``. ``l_t = min(d_t, clip(d_t, -e_low, e_high))`` where A
    is positive, and the maximum where it is negative, with ``d_t = log pi(y_t) - log pi_old(y_t)``: the bounds are of
    logarithms (the paper takes 0.4 for both), and each token is clipped by itself. A token that is clipped has no
    gradient, the others one that is multiplied by the mean of all. Averaged over rollouts.

    Metric: ``clipped``, the share of tokens that are clipped.
    """
    settings = inputs.settings
    mask = inputs.mask
    advantages = inputs.advantages[:, None]
    moved = inputs.log_probs - inputs.old_log_probs
    bounded = moved.clamp(-settings.epsilon_low, settings.epsilon_high)
    held = torch.where(advantages > 0, torch.min(moved, bounded), torch.max(moved, bounded))
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.exp((held * mask).sum(dim=1, keepdim=True) / length)
    share = (held != moved).to(inputs.log_probs).detach()
    losses = (-advantages * mean).expand(mask.shape)
    return LossOutputs(per_token=losses, aggregation="rollout_mean", metrics={"clipped": share})


@objective(token_advantages=True, on_policy=True)
def gpg(inputs: LossInputs) -> LossOutputs:
    """``L_t = -A_t pi(y_t) / stop_gradient(pi(y_t))``: policy gradient without ratio and clip, averaged over tokens.

    GPG, Chu et al. 2025, arXiv:2504.02546.

    The gradient is that of ``-A_t log pi(y_t)``; the value is that of PPO's surrogate at the ratio 1.
    """
    return LossOutputs(per_token=-inputs.ratio * inputs.token_advantages, aggregation="token_mean")
