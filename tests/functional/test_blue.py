"""BASIS refinement and calibration losses against double loops over the paper's equations."""

import math
from typing import get_args

import pytest
import torch

from basis_rl.functional.basis import Weighting, cross_entropy, mean_squared_error, refine


def loop_refine(values, rewards, active, weighting):
    """Eqs. 7, 8, 9 for one beta, sums written out."""
    baselines = []
    for i in range(len(values)):
        sources = [j for j in range(len(values)) if j != i and active[j] and not math.isnan(rewards[j])]
        if not active[i] or not sources:
            baselines.append(0.0)
            continue
        variance = [v * (1 - v) for v in values]
        if weighting == "rvg":
            baselines.append(values[i] / len(sources) * sum(rewards[j] / values[j] for j in sources))
        else:
            top = sum(values[j] * rewards[j] / variance[j] for j in sources)
            bottom = sum(values[j] ** 2 / variance[j] for j in sources) + (1 if weighting == "vop" else 0)
            baselines.append(values[i] * top / bottom)
    return baselines


def example(seed, n=23, k=3):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand((k, n), generator=generator, dtype=torch.float64) * 0.98 + 0.01
    rewards = torch.randint(0, 2, (n,), generator=generator).double()
    rewards[torch.rand(n, generator=generator) < 0.2] = torch.nan
    active = torch.rand((k, n), generator=generator) < 0.8
    return values, rewards, active


@pytest.mark.parametrize("weighting", [each for each in get_args(Weighting) if each != "none"])
@pytest.mark.parametrize("n", [2, 23])
@pytest.mark.parametrize("seed", range(4))
def test_refine_equals_plain_loop(weighting, seed, n):
    values, rewards, active = example(seed, n)
    refined = refine(values, values * (1 - values), rewards, active, weighting)
    for k in range(len(values)):
        expected = loop_refine(values[k].tolist(), rewards.tolist(), active[k].tolist(), weighting)
        torch.testing.assert_close(refined[k], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_extreme_values_stay_finite():
    values = torch.tensor([[1 - 1e-6, 1e-6, 1e-6]], dtype=torch.float64)
    active = torch.ones_like(values, dtype=torch.bool)
    for weighting in get_args(Weighting):
        refined = refine(values, values * (1 - values), torch.tensor([1.0, 1.0, 0.0]).double(), active, weighting)
        assert refined.isfinite().all()
        assert (refined >= 0).all()


def test_losses_equal_plain_loops():
    values, rewards, active = example(3)
    scored = active & ~rewards.isnan()
    squared, entropy = mean_squared_error(values, rewards, scored), cross_entropy(values, rewards, scored)
    for k in range(len(values)):
        rows = [i for i in range(len(rewards)) if scored[k, i]]
        r, v = rewards.tolist(), values[k].tolist()
        assert squared[k].item() == pytest.approx(sum((r[i] - v[i]) ** 2 for i in rows) / len(rows))
        terms = [-(r[i] * math.log(v[i]) + (1 - r[i]) * math.log(1 - v[i])) for i in rows]
        assert entropy[k].item() == pytest.approx(sum(terms) / len(rows))


def test_no_scored_row_is_infinite_loss():
    values, rewards, _ = example(0)
    nothing = torch.zeros_like(values, dtype=torch.bool)
    assert mean_squared_error(values, rewards, nothing).isinf().all()
    assert cross_entropy(values, rewards, nothing).isinf().all()
