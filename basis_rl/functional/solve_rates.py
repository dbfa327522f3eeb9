"""What a few 0/1 rewards of each prompt say about groups whose rewards are all equal, and so teach nothing.

Prompt i is solved with an unknown chance p_i, drawn from ``Beta(a, b)`` (empirical Bayes): k_i right rollouts of n_i
make it ``Beta(a + k_i, b + n_i - k_i)``. The share k_i / n_i itself would call every prompt with k_i = 0 impossible.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The grid on which the likelihood is looked at: means, and a + b.
_MEANS = 199
_STRENGTHS = (0.05, 1000.0, 120)


def fit_beta(successes: Tensor, counts: Tensor) -> tuple[float, float]:
    """``(a, b)`` with the largest likelihood of ``k_i ~ BetaBinomial(n_i, a, b)``, on a grid.

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
