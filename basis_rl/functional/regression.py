"""Regressions: what the rewards of all prompts say about the value of one.

Bayesian logistic regression on texts, ``V = sigmoid(w . phi + offset)``, ``w ~ N(0, variance)`` before the first
reward; and ridge regression on any features.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_WORDS = re.compile(r"\w+|[^\w\s]")
_DIGIT = re.compile(r"\d")
# Newton's steps end when the next one would raise the log-posterior by half of this.
_CLOSE = 1e-6
_MOST_STEPS = 20
# Of a feature: below it, what varies is rounding.
_LEAST_DEVIATION = 1e-6


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
    """Mean and variance of ``w . phi``. ``(..., F), (..., F, F), (P, F) -> (..., P), (..., P)``."""
    return mean @ features.T, ((features @ covariance) * features).sum(dim=-1).clamp(min=0.0)


def logistic_posterior(
    start: Tensor, features: Tensor, rewards: Tensor, counts: Tensor, offsets: Tensor, variance: float
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of w given N visits of prompts, ``(F,), (F, F)``: Laplace's approximation (Bishop 2006, 4.5).

    The mean is the w that maximises ``sum_i n_i (r_i log V_i + (1 - r_i) log(1 - V_i)) - |w|^2 / (2 variance)``, found
    by Newton's steps from `start`; the covariance is ``(phi' diag(n V (1 - V)) phi + 1 / variance)^-1`` there. After n
    failures of one text its V falls about as ``1 / n``. A filter that keeps mean and covariance alone, and not the
    rewards, would have it fall as ``n^(-1/2)``, because it counts early failures at the V of that time.

    Args:
        start: ``(F,)`` float64, best the mean before the last rewards.
        features: ``(N, F)``, one row per visit.
        rewards: ``(N,)`` in [0, 1], the mean of the visit's rollouts.
        counts: ``(N,)``, how many they are.
        offsets: ``(N,)``, what the logits are without w.
        variance: of each w before the first reward, > 0.
    """

    def log_posterior(w: Tensor) -> float:
        x = features @ w + offsets
        terms = rewards * logsigmoid(x) + (1 - rewards) * logsigmoid(-x)
        return float(counts @ terms - w @ w / (2 * variance))

    mean = start
    best = log_posterior(mean)
    for _ in range(_MOST_STEPS):
        value = torch.sigmoid(features @ mean + offsets)
        information = features.T @ ((counts * value * (1 - value))[:, None] * features)
        root = torch.linalg.cholesky(information + torch.eye(len(mean), dtype=mean.dtype) / variance)
        gradient = features.T @ (counts * (rewards - value)) - mean / variance
        step = torch.cholesky_solve(gradient[:, None], root)[:, 0]
        if float(gradient @ step) < _CLOSE:
            break
        # The log-posterior is concave, but a whole step from afar can go beyond its maximum.
        while log_posterior(mean + step) < best and float(gradient @ step) > _CLOSE / 10:
            step = step / 2
        mean = mean + step
        best = log_posterior(mean)
    return mean, torch.cholesky_inverse(root)


def ridge_predictions(seen: Tensor, targets: Tensor, asked: Tensor, widths: Sequence[int], penalty: float) -> Tensor:
    """What a ridge regression with an intercept predicts, ``(P,)`` float64.

    ``mean(y) + k(z, Z) (Z Z' + penalty I)^-1 (y - mean(y))``: the dual form, whose system has as many unknowns as there
    are rows. z are the features less their means over `seen`, over their standard deviations, and over the root of the
    width of their block, so that blocks count alike and ``|z|^2`` is about 1 for each.

    Args:
        seen: ``(M, F)`` features of the rows that it is fitted to, M >= 1.
        targets: ``(M,)`` float64.
        asked: ``(P, F)`` features of those that are predicted.
        widths: of the blocks of features, which sum to F.
        penalty: of the squared coefficients of z beside the sum of squared errors, > 0.
    """
    deviation, center = torch.std_mean(seen, dim=0, correction=0)
    roots = torch.cat([torch.full((width,), width**0.5) for width in widths])
    scale = deviation.clamp(min=_LEAST_DEVIATION) * roots
    seen = (seen - center) / scale
    system = (seen @ seen.T).double()
    system.diagonal().add_(penalty)
    mean = targets.mean()
    weights = torch.cholesky_solve((targets - mean)[:, None], torch.linalg.cholesky(system))[:, 0]
    return mean + ((asked - center) / scale @ seen.T).double() @ weights
