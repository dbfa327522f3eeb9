"""Statistics of ``(N,)`` values over segments (the groups of one prompt), ragged and in any order.

NaN marks a value that is missing: it takes no part in any statistic. Every function returns ``(N,)`` float64, the
statistic of each row's own segment, so the results line up with the rows whatever their order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _segments(group_ids: Tensor) -> tuple[Tensor, int]:
    unique, index = torch.unique(group_ids, return_inverse=True)
    return index, int(unique.numel())


def segment_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    """``S_i = sum_{j in g(i), x_j not NaN} x_j``; 0 for a segment with no value. ``(N,)``."""
    index, count = _segments(group_ids)
    present = torch.nan_to_num(values.double(), nan=0.0)
    return torch.zeros(count, dtype=torch.float64).index_add_(0, index, present)[index]


def segment_count(values: Tensor, group_ids: Tensor) -> Tensor:
    """``n_i``: how many values of row i's segment are not NaN. ``(N,)``."""
    return segment_sum((~values.isnan()).double(), group_ids)


def group_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """``m_i = S_i / n_i``; NaN for a segment with no value. ``(N,)``."""
    return segment_sum(values, group_ids) / segment_count(values, group_ids)


def group_std(values: Tensor, group_ids: Tensor) -> Tensor:
    """``s_i = sqrt(sum_j (x_j - m_i)^2 / (n_i - 1))``, ddof = 1 as in TRL; NaN where ``n_i < 2``. ``(N,)``."""
    deviations = (values.double() - group_mean(values, group_ids)) ** 2
    count = segment_count(values, group_ids)
    variance = segment_sum(deviations, group_ids) / (count - 1).clamp(min=0)
    return torch.where(count > 1, variance, torch.nan).sqrt()


def leave_one_out_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of the OTHER values of the segment, NaN where there is none. ``(N,)``.

    ``m_i = (S_i - x_i) / (n_i - 1)``; a row whose own value is NaN gets the mean of all the others, ``S_i / n_i``.
    """
    own = torch.nan_to_num(values.double(), nan=0.0)
    others = segment_count(values, group_ids) - (~values.isnan()).double()
    return (segment_sum(values, group_ids) - own) / torch.where(others > 0, others, torch.nan)
