"""The equations of BASIS (Gong et al. 2026): values of the tilted reference policy, and their batchwise refinement.

``pi_beta(y|x)`` is proportional to ``pi_ref(y|x) exp(r(x, y) / beta)``: ``beta -> infinity`` is the reference policy,
``beta -> 0`` the best that it can reach. `tilt_bernoulli` and `tilt_samples` (Eq. 5, Appendix D) return the mean and
variance of the reward under ``pi_beta``, for every candidate ``beta`` and every prompt, from rewards that were sampled
from ``pi_ref`` once. `refine` corrects a prompt's value by the rewards of the OTHER prompts of the batch, by
leave-one-out sums (total minus own term): O(N) for each beta, no ``N x N`` matrix.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Weighting = Literal["unb", "vop", "rvg", "none"]


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


def refine(values: Tensor, variances: Tensor, rewards: Tensor, active: Tensor, weighting: Weighting) -> Tensor:
    """Leave-one-out baselines of BASIS for each candidate beta.

    With ``S`` the rows that are active for that beta and have a reward, and ``var_j`` the reward's variance::

        unb   b_i = V_i * sum_{j in S, j != i} (V_j r_j / var_j) / sum_{j in S, j != i} (V_j^2 / var_j)         Eq. 7
        vop   the same with 1 + in the denominator                                                            Eq. 8
        rvg   b_i = V_i / |S \\ i| * sum_{j in S, j != i} r_j / V_j                                              Eq. 9
        none  b_i = V_i, the initial value alone

    Eq. 3 of the paper's main text lost the square in its denominator; Eq. 7 and the proof in E.1 are right. The own
    reward ``r_i`` is never used, so the policy gradient stays unbiased.

    Args:
        values: ``(K, N)`` initial values ``V``, in (0, 1) on active rows.
        variances: ``(K, N)`` their reward variances, positive on active rows.
        rewards: ``(N,)`` float64, NaN = not scored.
        active: ``(K, N)`` or ``(N,)`` bool.
        weighting: the rule.

    Returns:
        ``(K, N)`` float64; 0 where a row is not active, or (except for ``none``) has no other active scored row.
    """
    active = active.expand_as(values)
    if weighting == "none":
        return torch.where(active, values, 0.0)
    sources = active & ~rewards.isnan()
    r = torch.nan_to_num(rewards, nan=0.0)
    if weighting == "rvg":
        inverse = torch.where(sources, 1.0 / values, 0.0)
        numerator = inverse * r
        denominator = sources.double()
    else:
        weight = torch.where(sources, values / variances, 0.0)
        numerator = weight * r
        denominator = weight * values.masked_fill(~sources, 0.0)
    numerator = numerator.sum(dim=-1, keepdim=True) - numerator
    denominator = denominator.sum(dim=-1, keepdim=True) - denominator
    if weighting == "vop":
        denominator = denominator + 1.0
    others = sources.sum(dim=-1, keepdim=True) - sources.long()
    usable = active & (others > 0)
    # A row that outweighs all others can round the difference to 0; the smallest normal keeps the quotient finite.
    denominator = denominator.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(usable, values * numerator / denominator, 0.0)


def mean_squared_error(baselines: Tensor, rewards: Tensor, scored: Tensor) -> Tensor:
    """``L_beta = mean_{i in scored} (r_i - b_i)^2``, Eq. 6; infinity where no row is scored. ``(K, N) -> (K,)``."""
    return _mean_of(scored, (rewards - baselines) ** 2)


def cross_entropy(values: Tensor, rewards: Tensor, scored: Tensor) -> Tensor:
    """``L_beta = -mean_i [r_i log V_i + (1 - r_i) log(1 - V_i)]`` for rewards in [0, 1]. ``(K, N) -> (K,)``.

    The Bernoulli likelihood of the initial values; for other rewards in [0, 1] the proper scoring rule that the mean
    minimises.
    """
    return _mean_of(scored, -(torch.xlogy(rewards, values) + torch.xlogy(1.0 - rewards, 1.0 - values)))


def _mean_of(scored: Tensor, losses: Tensor) -> Tensor:
    """``(K,)`` means of the scored rows of ``(K, N)``; infinity where there are none."""
    means = torch.where(scored, losses, torch.nan).nanmean(dim=-1)
    return torch.where(means.isnan(), torch.inf, means)
