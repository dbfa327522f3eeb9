"""Value of the exponentially tilted reference policy, BASIS (Gong et al. 2026) Eq. 5 and Appendix D.

``pi_beta(y|x)`` is proportional to ``pi_ref(y|x) exp(r(x, y) / beta)``: ``beta -> infinity`` is the reference policy,
``beta -> 0`` the best that it can reach. Both functions return the mean and the variance of the reward under
``pi_beta``, for every candidate ``beta`` and every prompt, from rewards that were sampled from ``pi_ref`` once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def beta_grid() -> Tensor:
    """The paper's 230 candidates: 0.01 to 2.00 in steps of 0.01, then 2.1 to 5.0 in steps of 0.1. ``(K,)`` float64."""
    fine = torch.arange(1, 201, dtype=torch.float64) / 100
    coarse = torch.arange(21, 51, dtype=torch.float64) / 10
    return torch.cat([fine, coarse])


def tilt_bernoulli(p: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:
    """0/1 rewards: ``V = p e^(1/beta) / (1 - p + p e^(1/beta))``, ``var = V (1 - V)`` (Appendix D).

    Computed as ``sigmoid(logit(p) + 1/beta)``: at ``beta = 0.01`` the exponential is ``e^100``, past float32.

    Args:
        p: ``(B,)`` success rates of the reference policy, in [0, 1].
        betas: ``(K,)``, positive; infinity is the reference policy itself.

    Returns:
        values and variances, each ``(K, B)`` float64.
    """
    values = torch.sigmoid(torch.logit(p.double()) + (1.0 / betas.double())[:, None])
    return values, values * (1.0 - values)


def tilt_samples(samples: Tensor, weights: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:
    """Any rewards: ``V = sum_k c_k r_k e^(r_k/beta) / sum_k c_k e^(r_k/beta)``, ``var = E_beta[r^2] - V^2`` (Eq. 5).

    For 0/1 rewards both equal `tilt_bernoulli` with ``p = sum_k c_k r_k / sum_k c_k``.

    Args:
        samples: ``(B, n)`` rewards of the reference rollouts; NaN where a prompt has fewer than n.
        weights: ``(B, n)`` non-negative, the (pseudo-)count ``c_k`` of each sample.
        betas: ``(K,)``, positive, in units of the reward; infinity is the reference policy itself.

    Returns:
        values and variances, each ``(K, B)`` float64.
    """
    present = ~samples.isnan() & (weights > 0)
    rewards = torch.where(present, samples.double(), 0.0)
    counts = torch.where(present, weights.double(), 0.0)
    # Shifting by the largest present reward keeps every exponent <= 0, and one of them = 0, so nothing can overflow.
    top = torch.where(present, rewards, -torch.inf).amax(dim=1, keepdim=True)
    excess = torch.where(present, rewards - top, 0.0)
    values = []
    variances = []
    for beta in betas.double():
        tilted = counts * torch.exp(excess / beta)
        tilted = tilted / tilted.sum(dim=1, keepdim=True)
        value = (tilted * rewards).sum(dim=1)
        values.append(value)
        # E[(r - V)^2] rather than E[r^2] - V^2: the same number, without the cancellation.
        variances.append((tilted * (rewards - value[:, None]) ** 2).sum(dim=1))
    return torch.stack(values), torch.stack(variances)
