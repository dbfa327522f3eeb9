"""What the study of token baselines computes from exact gradients: variance, bias, and how well the energy fits.

A prompt has ``N`` rollouts in ``K = N / n`` groups of n; there are ``T`` tokens, ``D`` parameters, ``P`` prompts and
``B`` resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from basis_rl.baselines import (
    Baseline,
    DrGrpo,
    IsolatedEnergy,
    NoBaseline,
    Opo,
    OptimalGlobalBaseline,
    OptimalTokenBaseline,
    Rloo,
)
from basis_rl.types import RolloutBatch

BASELINES: dict[str, Baseline] = {
    "none": NoBaseline(),
    "group mean": DrGrpo(),
    "rloo": Rloo(),
    "opo": Opo(),
    "opo, token": Opo("token"),
    "ogb": OptimalGlobalBaseline(),
    "isolated energy": IsolatedEnergy(),
    "otb": OptimalTokenBaseline(),
    "otb, tail last": OptimalTokenBaseline("last"),
}


def advantages(baseline: Baseline, rewards: Tensor, mask: Tensor, energies: Tensor, n: int) -> Tensor:
    """Advantages ``(N,)`` or ``(N, T)`` of consecutive groups of n, as the trainer would compute them."""
    groups = torch.arange(len(rewards)) // n
    batch = RolloutBatch(
        rewards=rewards, group_ids=groups, prompt_ids=[str(g) for g in groups.tolist()], action_mask=mask,
        energies=energies,
    )  # fmt: skip
    return baseline.advantages(batch).values.float()


def true_norm_advantages(rewards: Tensor, squared_norms: Tensor, n: int) -> Tensor:
    """``(N,)``: OGB with the true weights, ``b = sum_i |S_i|^2 R_i / sum_i |S_i|^2`` over the group."""
    r, w = rewards.view(-1, n).double(), squared_norms.view(-1, n).double()
    return (r - (w * r).sum(1, keepdim=True) / w.sum(1, keepdim=True)).flatten().float()


def group_means(gradients: Tensor, n: int) -> Tensor:
    """``(N, D) -> (K, D)`` float64: the mean gradient of each group."""
    return gradients.view(-1, n, gradients.shape[1]).double().mean(dim=1)


def cross(a: Tensor, b: Tensor) -> float:
    """``sum_{k != l} a_k . b_l / (K (K - 1))``: unbiased for ``E[a] . E[b]`` although a_k and b_k share rollouts."""
    count = len(a)
    return float((a.sum(0) @ b.sum(0) - (a * b).sum()) / (count * (count - 1)))


def moments(means: Tensor, unbiased: Tensor) -> dict[str, float]:
    """Moments of one prompt's group gradients ``(K, D)``; `unbiased` are those of RLOO for the same groups.

    ``variance``: trace of the covariance; ``along``: ``E . g``; ``norm2``: ``|E|^2``; ``signal``: ``|g|^2``.
    """
    variance = float((means - means.mean(0)).square().sum() / (len(means) - 1))
    return {
        "variance": variance,
        "along": cross(means, unbiased),
        "norm2": cross(means, means),
        "signal": cross(unbiased, unbiased),
    }


def pooled(rows: list[Mapping[str, float]]) -> dict[str, float]:
    """Means over prompts, and quantities derived from them, with a jackknife error over prompts.

    ``kept`` is the share of g that the expected estimate keeps, ``along / signal`` (1 without bias). ``normalised`` is
    the variance over ``kept^2``, that is the variance after the learning rate has compensated the shrinkage. Both are
    NaN if no gradient was measured; ``normalised`` is also NaN if `kept` is less than twice its error.
    """
    mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    kept, error = mean["along"] / mean["signal"] if mean["signal"] > 0 else math.nan, math.nan
    if len(rows) > 1:
        along, signal = (sum(row[key] for row in rows) for key in ("along", "signal"))
        left = [(along - row["along"]) / (signal - row["signal"]) for row in rows if signal != row["signal"]]
        center = sum(left) / max(1, len(left))
        error = math.sqrt((len(rows) - 1) / len(rows) * sum((x - center) ** 2 for x in left))
    known = kept > 2 * error or (len(rows) == 1 and kept > 0)
    normalised = mean["variance"] / kept**2 if known else math.nan
    return {**mean, "kept": kept, "kept, error": error, "normalised": normalised}


def deviations(means: Tensor) -> Tensor:
    """``(K, D) -> (K, K)``: products ``(m_k - m) . (m_l - m)`` of the groups' distances from their mean ``m``."""
    apart = means - means.mean(0)
    return apart @ apart.T


def contributions(products: Tensor) -> Tensor:
    """``(K, K) -> (K,)``: each group's contribution to the variance, which is their sum; from `deviations`."""
    return products.diagonal() / (len(products) - 1)


def resamples(count: int, prompts: int, groups: int, seed: int) -> Tensor:
    """``(B, P, K)`` float64: how often each group is drawn if ``K - 1`` groups per prompt are drawn with replacement.

    ``K - 1`` groups are drawn, not K, because the spread of K groups drawn out of K is too small by ``(K - 1) / K``,
    which matters if K is 6.
    """
    drawn = np.random.default_rng(seed).multinomial(groups - 1, np.full(groups, 1 / groups), size=(count, prompts))
    return torch.from_numpy(drawn).double()


def resampled_variances(products: Tensor, counts: Tensor) -> Tensor:
    """``(P, K, K), (B, P, K) -> (B,)``: mean over prompts of the variance of the drawn groups around their own mean.

    NaN if fewer than two groups are drawn.

    Args:
        products: `deviations` of each prompt.
        counts: result of `resamples`; use the same one for all estimators that are compared.
    """
    drawn = counts[0, 0].sum()
    own = torch.einsum("bpk,pkk->bp", counts, products)
    between = (torch.einsum("bpk,pkl->bpl", counts, products) * counts).sum(-1)
    return ((own - between / drawn) / (drawn - 1)).mean(1)


def interval(above: Tensor, below: Tensor) -> list[float]:
    """Ends of the 95 % percentile interval of the ratio of two variances, ``(B,)`` each, from the same resamples."""
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    found: list[float] = torch.quantile(above / below, ends).tolist()
    return found


def share(row: Mapping[str, float], against: Mapping[str, float], key: str) -> float:
    """``row[key] / against[key]``; NaN if the denominator is 0."""
    return row[key] / against[key] if against[key] else math.nan


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation."""
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


def correlation_within(x: Tensor, y: Tensor, places: Tensor) -> float:
    """Pearson's correlation after the mean at each position (`places`) is subtracted from both."""
    rows = torch.zeros(3, int(places.max()) + 1, dtype=torch.float64)
    rows.index_add_(1, places, torch.stack([torch.ones_like(x), x, y]).double())
    x, y = (side.double() - (total / rows[0])[places] for side, total in zip((x, y), rows[1:], strict=True))
    return float((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt())


def ratio_spread(x: Tensor, y: Tensor) -> float:
    """Coefficient of variation of ``y / x``, weighted by x: 0 if y is proportional to x."""
    ratio, weight = y.double() / x.double(), x.double() / x.double().sum()
    center = (weight * ratio).sum()
    return float((weight * (ratio - center) ** 2).sum().sqrt() / center)


def within_groups(x: Tensor, y: Tensor, n: int) -> float:
    """Mean of the correlations within groups, without groups in which x or y does not vary; NaN if none is left."""
    found = [
        correlation(a, b)
        for a, b in zip(x.view(-1, n), y.view(-1, n), strict=True)
        if float(a.double().std()) > 0 and float(b.double().std()) > 0
    ]
    return sum(found) / len(found) if found else float("nan")
