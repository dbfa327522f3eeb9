"""Estimates from n graded samples of each of P problems: pass@k, maj@k, intervals, comparisons, solve rates.

Problems are the unit: every function gives one number per problem, or resamples problems, never samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_RESAMPLES_AT_A_TIME = 1 << 22
# The grid on which the likelihood is looked at: means, and a + b.
_MEANS = 199
_STRENGTHS = (0.05, 1000.0, 120)


def pass_at_k(num_samples: Tensor | int, num_correct: Tensor, k: int) -> Tensor:
    """Chance that at least one of k samples is right, unbiased: ``1 - C(n - c, k) / C(n, k)``. ``(P,)`` float64.

    Chen et al. 2021 (Codex), equation 1, as the product ``1 - prod_{i<k} (n - c - i) / (n - i)``: no large numbers,
    each factor in [0, 1]. ``pass_at_k(n, c, 1)`` is the share of right samples.

    Args:
        num_samples: n, one for all or ``(P,)``.
        num_correct: c ``(P,)``, in 0..n.
        k: in 1..min n.

    Raises:
        ValueError: k or c out of its range.
    """
    c = num_correct.double()
    n = torch.as_tensor(num_samples, dtype=torch.float64).expand_as(c)
    if not 1 <= k <= int(n.min()) or bool(((c < 0) | (c > n)).any()):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got k = {k}, the least n {int(n.min())}.")
    i = torch.arange(k, dtype=torch.float64)
    # With k > n - c a numerator reaches 0, and the product with it: a right sample is certain.
    return 1 - ((n - c)[:, None] - i).clamp(min=0).div(n[:, None] - i).prod(dim=1)


def majority_at_k(votes: Tensor, correct: Tensor, k: int) -> Tensor:
    """Expected accuracy of the majority vote over k of the n samples, drawn without replacement. ``(P,)`` float64.

    The mean over all ``C(n, k)`` subsets, computed exactly. The answer with the most votes wins, the winners of a tie
    are taken with equal chances. A sample without an answer does not vote; where none of the k votes, the result is
    wrong. For each answer a and each number t of votes with which it may win,

        ``P(a wins with t votes, j others tied) = Bin(m_a, t) [x^(k-t) y^j] prod_{b != a} sum_{x_b <= t} Bin(m_b, x_b)
        x^(x_b) y^(x_b = t) / Bin(n, k)``,

    binomials at ``q = k / n``: samples that are chosen independently are, once k of them are chosen, a uniform subset.

    Args:
        votes: ``(P, n)`` int64, equal answers of a problem have equal numbers >= 0; -1 is no answer.
        correct: ``(P, n)``, whether each sample is right (mean of its samples where an answer was graded differently).
        k: in 1..n.

    Raises:
        ValueError: k out of its range.
    """
    n = votes.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= n, got k = {k}, n = {n}.")
    rows = zip(votes, correct.double(), strict=True)
    return torch.tensor([_majority(row, right, k) for row, right in rows], dtype=torch.float64)


def _majority(votes: Tensor, correct: Tensor, k: int) -> float:
    answers, index, sizes = torch.unique(votes, return_inverse=True, return_counts=True)
    values = torch.zeros(len(answers), dtype=torch.float64).index_add_(0, index, correct) / sizes
    # Any q gives the same result; at this one k chosen samples are most likely, so nothing underflows.
    q = k / len(votes)
    chosen = [_binomial(int(size), q) for size in sizes]
    silent = [p for p, answer in zip(chosen, answers.tolist(), strict=True) if answer < 0]
    voting = [(p, float(v)) for p, v, a in zip(chosen, values, answers.tolist(), strict=True) if a >= 0]
    total = 0.0
    for a, (own, value) in enumerate(voting):
        if value > 0:
            others = [p for b, (p, _) in enumerate(voting) if b != a]
            total += value * sum(
                float(own[t]) * _beaten(others, silent, t, k - t) for t in range(1, min(k, len(own) - 1) + 1)
            )
    return total / float(_binomial(len(votes), q)[k])


def _beaten(others: list[Tensor], silent: list[Tensor], t: int, rest: int) -> float:
    """``sum_j P(the others take `rest` samples, none has more than t votes, j have t) / (j + 1)``."""
    # Axes: answers that tie, samples taken.
    state = torch.zeros(rest // t + 1, rest + 1, dtype=torch.float64)
    start = silent[0] if silent else torch.ones(1, dtype=torch.float64)
    state[0, : len(start)] = start[: rest + 1]
    for chances in others:
        after = torch.zeros_like(state)
        for x, chance in enumerate(chances[: min(t, rest + 1)].tolist()):
            if chance > 0:
                after[:, x:] += chance * state[:, : rest + 1 - x]
        if len(chances) > t and rest >= t:
            # One more answer with t votes: a tie.
            after[1:, t:] += float(chances[t]) * state[:-1, : rest + 1 - t]
        state = after
    return float((state[:, rest] / torch.arange(1, len(state) + 1)).sum())


def _binomial(n: int, q: float) -> Tensor:
    """Chances of 0..n successes. ``(n + 1,)`` float64."""
    x = torch.arange(n + 1, dtype=torch.float64)
    if q == 1:
        return (x == n).double()
    ways = math.lgamma(n + 1) - torch.lgamma(x + 1) - torch.lgamma(n - x + 1)
    return (ways + x * math.log(q) + (n - x) * math.log1p(-q)).exp()


def bootstrap_interval(
    values: Tensor, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values`, problems drawn with replacement.

    It says how far the score depends on which problems are in the set. Where all problems have the same value it has no
    width: then there is nothing to resample, which is not certainty.

    Args:
        values: ``(P,)``, one score per problem.
        level: of the interval, in (0, 1).
        resamples: sets drawn.
        seed: the same seed gives the same interval.

    Raises:
        ValueError: no values, or a level out of its range.
    """
    if values.numel() == 0 or not 0 < level < 1:
        raise ValueError(f"bootstrap_interval needs values and 0 < level < 1, got {values.numel()} values, {level}.")
    values = values.double()
    generator = torch.Generator().manual_seed(seed)
    count = values.numel()
    at_a_time = max(1, _RESAMPLES_AT_A_TIME // count)
    means = [
        values[torch.randint(count, (min(at_a_time, resamples - done), count), generator=generator)].mean(dim=1)
        for done in range(0, resamples, at_a_time)
    ]
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.cat(means), tails).tolist()
    return low, high


@dataclass(frozen=True)
class Paired:
    """Two models on the same problems: mean of ``b - a``, its bootstrap interval, and the p-value of no difference."""

    difference: float
    low: float
    high: float
    p_value: float
    num_problems: int


def compare_paired(a: Tensor, b: Tensor, num_samples: tuple[int, int], *, level: float = 0.95, seed: int = 0) -> Paired:
    """Compare two models' counts of right samples on the same problems.

    The interval is a paired bootstrap over problems. The p-value is that of the exact two-sided sign-flip permutation
    test: if the models were the same, each problem's difference could as well have the other sign.

    Args:
        a: ``(P,)`` int64, right samples of the first model, of n_a each.
        b: ``(P,)`` int64, of the second model, of n_b each, the same problems in the same order.
        num_samples: n_a, n_b.
        level: of the interval.
        seed: of the bootstrap.

    Raises:
        ValueError: not the same number of problems.
    """
    if a.shape != b.shape:
        raise ValueError(f"A paired comparison needs the same problems, got {a.numel()} and {b.numel()}.")
    n_a, n_b = num_samples
    common = math.lcm(n_a, n_b)
    differences = b.long() * (common // n_b) - a.long() * (common // n_a)
    shares = differences.double() / common
    low, high = bootstrap_interval(shares, level=level, seed=seed)
    return Paired(float(shares.mean()), low, high, sign_flip_p_value(differences), a.numel())


def sign_flip_p_value(differences: Tensor) -> float:
    """``P(|sum_i s_i d_i| >= |sum_i d_i|)`` over independent fair signs s_i, exactly. For d_i in {-1, 0, 1} it is
    McNemar's exact test.

    The distribution of the sum is built up difference by difference, which whole numbers allow.

    Args:
        differences: ``(P,)`` int64.
    """
    steps = [abs(d) for d in differences.tolist() if d != 0]
    divisor = math.gcd(*steps) or 1
    steps = [d // divisor for d in steps]
    reach = sum(steps)
    chances = torch.zeros(2 * reach + 1, dtype=torch.float64)
    chances[reach] = 1.0
    for d in steps:
        # Never wraps: `reach` bounds the sum.
        chances = 0.5 * (torch.roll(chances, d) + torch.roll(chances, -d))
    observed = abs(int(differences.sum())) // divisor
    sums = torch.arange(-reach, reach + 1)
    return min(1.0, float(chances[sums.abs() >= observed].sum()))


def fit_beta(successes: Tensor, counts: Tensor) -> tuple[float, float]:
    """``(a, b)`` with the largest likelihood of ``k_i ~ BetaBinomial(n_i, a, b)``, on a grid.

    Prompt i is solved with an unknown chance p_i, drawn from ``Beta(a, b)`` (empirical Bayes): k_i right rollouts of
    n_i make it ``Beta(a + k_i, b + n_i - k_i)``. The share k_i / n_i itself would call prompts with k_i = 0 impossible.

    Args:
        successes: k, ``(P,)``, in 0..n_i.
        counts: n, ``(P,)``, >= 1; at least one >= 2, else every a + b is as likely as any other.
    """
    pairs, times = torch.stack([successes.double(), counts.double()]).unique(dim=1, return_counts=True)
    k, n = pairs[:, None, None]
    mean = (torch.arange(_MEANS, dtype=torch.float64) + 1) / (_MEANS + 1)
    low, high, steps = _STRENGTHS
    strength = torch.logspace(torch.tensor(low).log10(), torch.tensor(high).log10(), steps, dtype=torch.float64)
    a = (mean[:, None] * strength)[..., None]
    b = ((1 - mean[:, None]) * strength)[..., None]
    likelihood = (times * (_log_beta(a + k, b + n - k) - _log_beta(a, b))).sum(dim=-1)
    row, column = divmod(int(likelihood.argmax()), steps)
    return float(a[row, column]), float(b[row, column])


def without_variance(a: Tensor, b: Tensor, size: int) -> Tensor:
    """``E[p^G + (1 - p)^G]`` for ``p ~ Beta(a, b)``: the chance that all G rewards of a group are equal.

    Args:
        a: ``(P,)``, > 0.
        b: ``(P,)``, > 0.
        size: G >= 1.

    Returns:
        ``(P,)``, in (0, 1]; 1 for G = 1.
    """
    both = _log_beta(a, b)
    return (_log_beta(a + size, b) - both).exp() + (_log_beta(a, b + size) - both).exp()


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
