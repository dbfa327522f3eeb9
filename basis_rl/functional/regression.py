"""Bayesian logistic regression, learnt online: what a prompt's text says about its value before it is sampled.

``V = sigmoid(w . phi + offset)``, ``w ~ N(m, S)``. All rewards so far are summed up in m and S, by one step of an
extended Kalman filter per batch, as each prompt's own belief is (`basis_rl.functional.history`).
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from basis_rl.functional.history import expected_sigmoid

_WORDS = re.compile(r"\w+|[^\w\s]")
_DIGIT = re.compile(r"\d")


def hashed_words(texts: Sequence[str], width: int) -> Tensor:
    """``(P, F)`` float32, rows of length 1: counts of words, signs and pairs of neighbours, hashed to F places.

    Each counts +1 or -1 by another bit of its hash, so that two which share a place cancel in expectation (Weinberger
    et al. 2009). In a pair all digits are 0: between which words a number of which length stands says more of a
    problem than which number it is. A text without words is 0.
    """
    features = np.zeros((len(texts), width), np.float32)
    for row, text in zip(features, texts, strict=True):
        words = _WORDS.findall(text.lower())
        shapes = [_DIGIT.sub("0", word) for word in words]
        terms = [*words, *map(" ".join, itertools.pairwise(shapes))]
        hashes = np.array([zlib.crc32(term.encode()) for term in terms], np.int64)
        row += np.bincount(hashes % width, np.where(hashes >> 31, 1.0, -1.0), minlength=width)
    return torch.nn.functional.normalize(torch.from_numpy(features), dim=1)


def predicted_logits(mean: Tensor, covariance: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``w . phi``. ``(F,), (F, F), (P, F) -> (P,), (P,)``."""
    return features @ mean, ((features @ covariance) * features).sum(dim=1).clamp(min=0.0)


def regression_update(
    mean: Tensor, covariance: Tensor, features: Tensor, rewards: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``S' = (S^-1 + phi' H phi)^-1``, ``m' = m + S' phi' (r - V)``, with ``H = diag(V (1 - V))`` at the expected V.

    By Woodbury's identity where there are fewer rollouts than features: in O(F^2 N + min(F, N)^3).

    Args:
        mean: ``(F,)`` float64.
        covariance: ``(F, F)``.
        features: ``(N, F)``, one row per rollout.
        rewards: ``(N,)`` in [0, 1]; NaN is left out.
        offset: what all logits have in common.
    """
    scored = ~rewards.isnan()
    phi = features[scored]
    r = rewards[scored]
    if not len(r):
        return mean, covariance
    logit, variance = predicted_logits(mean, covariance, phi)
    value = expected_sigmoid(logit + offset, variance)
    information = (value * (1 - value)).clamp(min=1e-6)
    if len(r) < len(mean):
        spread = covariance @ phi.T
        gain = torch.linalg.solve(torch.diag(1.0 / information) + phi @ spread, spread.T).T
        covariance = covariance - gain @ spread.T
    else:
        total = phi.T @ (information[:, None] * phi)
        covariance = torch.linalg.solve(torch.eye(len(mean), dtype=phi.dtype) + covariance @ total, covariance)
    covariance = (covariance + covariance.T) / 2
    return mean + covariance @ (phi.T @ (r - value)), covariance
