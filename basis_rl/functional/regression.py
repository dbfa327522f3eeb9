"""Bayesian logistic regression, learnt online: the value of a prompt that was never sampled, from its features.

``V = sigmoid(w . phi)``, ``w ~ N(m, S)``. All rewards so far are summed up in m and S, by one step of an extended
Kalman filter per batch, as each prompt's own belief is (`basis_rl.functional.history`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from basis_rl.functional.history import expected_sigmoid, sigmoid_variance


def predicted_logits(mean: Tensor, covariance: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the logits, ``phi m`` and ``phi S phi'``. ``(F,), (F, F), (P, F) -> (P,), (P,)``."""
    return features @ mean, ((features @ covariance) * features).sum(dim=1).clamp(min=0.0)


def regression_update(mean: Tensor, covariance: Tensor, features: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """``S' = (S^-1 + phi' H phi)^-1``, ``m' = m + S' phi' (r - V)``, with ``H = diag(V (1 - V))`` at the expected V.

    By Woodbury's identity in O(F^2 N + N^3) where that is less.

    Args:
        mean: ``(F,)``.
        covariance: ``(F, F)``.
        features: ``(N, F)``, of rollouts, one row each.
        rewards: ``(N,)`` in [0, 1]; NaN is left out.
    """
    scored = ~rewards.isnan()
    phi, r = features[scored], rewards[scored]
    if not len(r):
        return mean, covariance
    logit, variance = predicted_logits(mean, covariance, phi)
    value = expected_sigmoid(logit, variance)
    information = (value * (1 - value)).clamp(min=1e-6)
    spread = covariance @ phi.T
    gain = torch.linalg.solve(torch.diag(1.0 / information) + phi @ spread, spread.T).T
    covariance = covariance - gain @ spread.T
    covariance = (covariance + covariance.T) / 2
    return mean + covariance @ (phi.T @ (r - value)), covariance


def predicted_values(mean: Tensor, covariance: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the values. ``(P,), (P,)``."""
    logit, variance = predicted_logits(mean, covariance, features)
    return expected_sigmoid(logit, variance), sigmoid_variance(logit, variance)
