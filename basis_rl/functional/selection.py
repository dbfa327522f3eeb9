"""Draws of different prompts with known chances, and how a batch's rollouts are divided among its prompts.

A sampler that draws n of P prompts with chances ``pi_i`` (``sum_i pi_i = n``) trains on ``sum_i pi_i J_i`` in place of
the uniform ``(n / P) sum_i J_i``. Known chances can be undone: weighing prompt i by ``(n / P) / pi_i`` gives the
uniform objective again, in expectation (Horvitz and Thompson 1952).
"""

from __future__ import annotations

import torch
from torch import Tensor


def inclusion_probabilities(weights: Tensor, size: int) -> Tensor:
    """``pi_i = min(1, c w_i)``, with c such that ``sum_i pi_i = size``. ``(P,) -> (P,)`` float64.

    Chances are proportional to the weights, except that none exceeds 1: what a prompt has above it goes to the others.
    Sorted by weight, the k heaviest have ``pi = 1`` for the least k at which ``c = (size - k) / (sum of the others)``
    leaves all others at most 1.

    Args:
        weights: ``(P,)``, >= 0, finite, at least `size` of them > 0.
        size: n, in 1..P.

    Raises:
        ValueError: weights that are negative or not finite, or fewer than `size` of them positive.
    """
    w = weights.double()
    if bad := int((~w.isfinite() | (w < 0)).sum()):
        raise ValueError(f"{bad} of {w.numel()} weights are negative or not finite; a weight is a number >= 0.")
    given = int((w > 0).sum())
    # A sum of very small or very large weights stays finite.
    w = w / w.max() if given else w
    positive = int((w > 0).sum())
    if positive < size:
        lost = f" ({given - positive} more vanish beside the largest one)" if given > positive else ""
        few = f"{positive} prompts have a positive weight{lost}, and a batch takes {size} different ones"
        raise ValueError(f"{few}. Give every prompt a small weight, a floor.")
    ordered = w.sort(descending=True).values
    # Of the prompts from the k-th heaviest on, k = 0..n-1.
    rest = ordered.flip(0).cumsum(0).flip(0)[:size]
    left = size - torch.arange(size, dtype=torch.float64)
    # With k certain ones, the next is not; true of k = n - 1.
    fits = left * ordered[:size] <= rest * (1 + 1e-12)
    certain = int(fits.nonzero()[0])
    # In this order no 0 * inf, however small the rest is.
    return (w / rest[certain] * left[certain]).clamp(max=1.0)


def systematic_sample(chances: Tensor, generator: torch.Generator) -> Tensor:
    """``n = sum_i pi_i`` different indices, index i with probability exactly ``pi_i``, in random order. ``(n,)`` int64.

    Madow's systematic sampling over a random order of the prompts: they lie one after the other on a line, i with
    length ``pi_i``, and those that the points ``u, u + 1, u + 2, ...`` hit are drawn, with one u uniform in [0, 1).

    Args:
        chances: ``(P,)`` in [0, 1], whose sum is a whole number except for rounding.
        generator: of random numbers.
    """
    size = round(float(chances.sum()))
    order = torch.randperm(chances.numel(), generator=generator)
    ends = chances.double()[order].cumsum(0)
    ends = ends * (size / float(ends[-1]))
    points = torch.rand((), generator=generator, dtype=torch.float64) + torch.arange(size, dtype=torch.float64)
    hit = torch.searchsorted(ends, points, right=True).clamp(max=chances.numel() - 1)
    drawn = order[hit]
    return drawn[torch.randperm(size, generator=generator)]


def allocation(variances: Tensor, total: int, least: int, most: int) -> Tensor:
    """``(P,) -> (P,)`` int64 rollouts of each prompt: the n_i that make ``sum_i variance_i / n_i`` least.

    That is the variance of the sum of the prompts' mean gradients if each rollout of prompt i adds noise of
    ``variance_i``; without bounds and rounding it gives ``n_i`` proportional to the standard deviation (Neyman 1934).
    The next rollout of a prompt that has n takes ``variance_i / (n (n + 1))`` away, which falls with n. So the steps
    that take away most are the best ones in whole numbers too. Among equal ones, prompts with fewer rollouts and then
    those that come first are served first.

    Args:
        variances: ``(P,)``, >= 0 and finite.
        total: N, in ``P * least .. P * most``.
        least, most: bounds of each n_i, ``1 <= least <= most``.
    """
    prompts = variances.numel()
    assert least >= 1
    assert prompts * least <= total <= prompts * most
    have = torch.arange(least, most)
    saved = variances.double() / (have * (have + 1))[:, None]
    best = saved.flatten().argsort(descending=True, stable=True)[: total - prompts * least]
    return least + torch.bincount(best % prompts, minlength=prompts)


def effective_number(weights: Tensor) -> float:
    """Kish's ``(sum_i w_i)^2 / sum_i w_i^2``: from 1, one prompt has all the weight, to P, all have the same."""
    w = weights.double()
    return float(w.sum() ** 2 / (w**2).sum())
