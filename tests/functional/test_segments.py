"""Segment statistics against plain loops: ragged groups, NaN, any order."""

import math
from statistics import fmean, stdev

import pytest
import torch

from basis_rl.functional.segments import group_mean, group_std, leave_one_out_mean, segment_count, segment_sum

NAN = math.nan


def loop(statistic, values, groups):
    """`statistic(own value, the present values of the group, the present values of the others of the group)`."""
    rows = []
    for i, group in enumerate(groups):
        members = [v for v, g in zip(values, groups, strict=True) if g == group and not math.isnan(v)]
        others = [
            v
            for j, (v, g) in enumerate(zip(values, groups, strict=True))
            if g == group and j != i and not math.isnan(v)
        ]
        rows.append(statistic(members, others))
    return torch.tensor(rows, dtype=torch.float64)


CASES = {
    "segment_sum": (segment_sum, lambda members, _: float(sum(members))),
    "segment_count": (segment_count, lambda members, _: float(len(members))),
    "group_mean": (group_mean, lambda members, _: fmean(members) if members else NAN),
    "group_std": (group_std, lambda members, _: stdev(members) if len(members) > 1 else NAN),
    "leave_one_out_mean": (leave_one_out_mean, lambda _, others: fmean(others) if others else NAN),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_plain_loop(name, seed):
    function, statistic = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(40, generator=generator)
    values[torch.rand(40, generator=generator) < 0.3] = NAN
    groups = torch.randint(0, 12, (40,), generator=generator) * 5 - 7
    expected = loop(statistic, values.tolist(), groups.tolist())
    torch.testing.assert_close(function(values, groups), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
