"""The tilted reference policy: BASIS Eq. 5 against its definition, Appendix D as its special case, and its limits."""

import math

import pytest
import torch

from basis_rl.functional.basis import beta_grid, tilt_bernoulli, tilt_samples


def test_grid_is_the_papers():
    expected = [i / 100 for i in range(1, 201)] + [i / 10 for i in range(21, 51)]
    assert beta_grid().tolist() == pytest.approx(expected, abs=1e-12)


def test_samples_equal_the_definition():
    rewards = [[0.0, 0.3, 1.0, 0.3], [0.7, 0.7, 0.1, math.nan]]
    weights = [[1.0, 2.0, 1.0, 0.5], [1.0, 1.0, 3.0, 9.0]]
    betas = [0.2, 1.0, 4.0]
    values, variances = tilt_samples(torch.tensor(rewards), torch.tensor(weights), torch.tensor(betas))
    for k, beta in enumerate(betas):
        for i in range(2):
            pairs = [(r, c) for r, c in zip(rewards[i], weights[i], strict=True) if not math.isnan(r)]
            z = sum(c * math.exp(r / beta) for r, c in pairs)
            v = sum(c * r * math.exp(r / beta) for r, c in pairs) / z
            second = sum(c * r * r * math.exp(r / beta) for r, c in pairs) / z
            assert values[k, i].item() == pytest.approx(v, abs=1e-6)
            assert variances[k, i].item() == pytest.approx(second - v * v, abs=1e-6)


def test_binary_rewards_reduce_to_appendix_d():
    betas = beta_grid()
    successes, n = [0, 1, 7, 16], 16
    samples = torch.tensor([[1.0] * k + [0.0] * (n - k) for k in successes])
    general = tilt_samples(samples, torch.ones_like(samples), betas)
    special = tilt_bernoulli(torch.tensor(successes) / n, betas)
    torch.testing.assert_close(general, special, rtol=1e-9, atol=1e-12)


def test_smallest_beta_does_not_overflow():
    values, variances = tilt_bernoulli(torch.tensor([0.0, 1e-6, 0.5, 1.0]), torch.tensor([0.01]))
    assert values.isfinite().all()
    assert variances.isfinite().all()
    assert values[0].tolist() == pytest.approx([0.0, 1.0, 1.0, 1.0])
    samples = torch.tensor([[0.0, 700.0], [-900.0, 900.0]])
    general, _ = tilt_samples(samples, torch.ones_like(samples), torch.tensor([0.01]))
    assert general[0].tolist() == [700.0, 900.0]


def test_a_sample_of_no_weight_has_no_say():
    """Not even in where the exponents start: the largest reward that counts has exponent 0."""
    samples, weights = torch.tensor([[0.0, 1.0, 700.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    values, variances = tilt_samples(samples, weights, torch.tensor([0.01, 1.0]))
    expected = tilt_samples(samples[:, :2], weights[:, :2], torch.tensor([0.01, 1.0]))
    torch.testing.assert_close((values, variances), expected)


def test_infinite_beta_is_the_reference_policy():
    p = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)
    infinity = torch.tensor([torch.inf])
    torch.testing.assert_close(tilt_bernoulli(p, infinity)[0][0], p)
    samples = torch.tensor([[0.1, 0.5, torch.nan]], dtype=torch.float64)
    values, _ = tilt_samples(samples, torch.ones_like(samples), infinity)
    assert values[0, 0].item() == pytest.approx(0.3)
