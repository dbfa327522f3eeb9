"""A Bayesian filter on the logit scale whose observations are shared across a batch: what `basis_history` is made of.

Prompt i has a belief ``x_i ~ N(m_i, v_i)`` about the logit of its value. All prompts of a batch have moved by one
common shift s since the beliefs were formed, ``r_i ~ Bernoulli(sigmoid(m_i + s))``; s lives on a grid, so that it can
be integrated out exactly, for each row without that row's own reward. Rewards are in [0, 1]; between the ends the
Bernoulli likelihood is a quasi-likelihood, whose variance ``V (1 - V)`` is the largest that such a reward can have.

How fast a prompt moves by itself is unknown: D filters run beside each other, one for each candidate of the variance
that each step adds, and are weighted by how well each has predicted (`prequential_update`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def shift_grid() -> Tensor:
    """Candidate shifts in logits: -4 to 8 in steps of 0.05. ``(S,)`` float64."""
    return torch.arange(-80, 161, dtype=torch.float64) / 20


def drift_grid() -> Tensor:
    """Candidate variances that a prompt's logit gains per step: 0, then 0.0004 to 0.1024 by factors of 4. ``(D,)``."""
    return torch.tensor([0.0, *(0.0004 * 4.0**k for k in range(5))], dtype=torch.float64)


def shift_log_likelihood(mean: Tensor, rewards: Tensor, shifts: Tensor) -> Tensor:
    """``l_si = r_i log sigmoid(m_i + s) + (1 - r_i) log sigmoid(-m_i - s)``; 0 where the reward is NaN. ``(S, N)``."""
    logits = mean[None] + shifts[:, None]
    r = torch.nan_to_num(rewards, nan=0.0)
    # log sigmoid(-x) = log sigmoid(x) - x
    terms = torch.nn.functional.logsigmoid(logits) - (1.0 - r) * logits
    return torch.where(rewards.isnan(), 0.0, terms)


def shift_posterior(log_likelihood: Tensor, log_prior: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the shift given all rewards of the batch. ``(S, N), (S,), (S,) -> (), ()``."""
    weights = torch.softmax(log_likelihood.sum(dim=1) + log_prior, dim=0)
    mean = (weights * shifts).sum()
    return mean, (weights * (shifts - mean) ** 2).sum()


def leave_one_out_shift(log_likelihood: Tensor, log_prior: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the shift given the rewards of all OTHER rows, for each row. ``(S, N), (S,), (S,) -> (N,)``.

    Exact: the own term is taken out of the log-posterior of each candidate before it is normalised. O(S N).
    """
    # Log-likelihoods add up over rows, so the own one can be subtracted exactly.
    others = log_likelihood.sum(dim=1, keepdim=True) - log_likelihood + log_prior[:, None]
    weights = torch.softmax(others, dim=0)
    mean = shifts @ weights
    return mean, (shifts**2 @ weights - mean**2).clamp(min=0.0)


def expected_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """``E[sigmoid(x)], x ~ N(mean, variance)``, as ``sigmoid(mean / sqrt(1 + pi variance / 8))`` (MacKay 1992)."""
    return torch.sigmoid(mean / torch.sqrt(1.0 + math.pi / 8.0 * variance))


def sigmoid_variance(mean: Tensor, variance: Tensor) -> Tensor:
    """``Var[sigmoid(x)], x ~ N(mean, variance)``, as ``V (1 - V) (1 - 1 / sqrt(1 + pi variance / 8))``.

    V is `expected_sigmoid`. Of the Bernoulli variance ``V (1 - V)``, what is not left once x is known: exact for
    variance 0 and infinity, else within 0.013 of the integral (means from -6 to 6, variances from 0.01 to 100).
    """
    value = expected_sigmoid(mean, variance)
    return value * (1.0 - value) * (1.0 - torch.rsqrt(1.0 + math.pi / 8.0 * variance))


def filter_update(mean: Tensor, variance: Tensor, residual: Tensor, information: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the extended Kalman filter in logits, for P prompts that were seen.

    ``v' = v / (1 + v H)``, ``m' = m + v' R``, with ``R = sum (r - V)`` and ``H = sum V (1 - V)`` over the prompt's
    rollouts. All ``(..., P)``.
    """
    posterior = variance / (1.0 + variance * information)
    return mean + posterior * residual, posterior


def beta_update(
    mean: Tensor, variance: Tensor, value: Tensor, residual: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of a Beta belief in the coordinates of the logit, for P prompts that were seen.

    ``n = 1 / (v V (1 - V))`` rollouts are behind the belief, so ``V' = V + R / (n + c)``, with ``R = sum (r - V)`` over
    the c rollouts of the prompt, ``m' = m + logit V' - logit V`` and ``v' = 1 / ((n + c) V' (1 - V'))``. Without a
    common shift that is exactly the Beta-Bernoulli rule. After n failures V falls as 1 / n; with `filter_update` it
    falls as ``n^(-1/2)``, because the information of the early failures is counted at the V of that time. All
    ``(..., P)``, `value` in (0, 1).
    """
    # The Beta's pseudo-count: its variance in logits is about 1 / (n V (1 - V)).
    behind = 1.0 / (variance * value * (1.0 - value))
    after = behind + count
    new = value + residual / after
    return mean + torch.logit(new) - torch.logit(value), 1.0 / (after * new * (1.0 - new))


def prequential_update(log_weights: Tensor, values: Tensor, rewards: Tensor, forgetting: float) -> Tensor:
    """``log w_d <- forgetting log w_d + sum_i log p(r_i | V_di)``, normalised: how well each filter predicts lately.

    Args:
        log_weights: ``(D,)``.
        values: ``(D, N)`` in (0, 1), each told without the own reward.
        rewards: ``(N,)`` in [0, 1]; NaN is left out.
        forgetting: in (0, 1]; 1 keeps the whole past.
    """
    scored = ~rewards.isnan()
    r = rewards[scored]
    # Each filter is judged by values that were told before the reward was seen.
    v = values[:, scored]
    log_likelihood = (r * torch.log(v) + (1.0 - r) * torch.log1p(-v)).sum(dim=1)
    return torch.log_softmax(forgetting * log_weights + log_likelihood, dim=0)
