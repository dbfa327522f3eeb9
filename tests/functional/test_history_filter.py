"""The parts of the filter with history, each against plain loops or a closed form."""

import math

import pytest
import torch

from basis_rl.functional.history import (
    beta_update,
    expected_sigmoid,
    filter_update,
    leave_one_out_shift,
    prequential_update,
    shift_grid,
    shift_log_likelihood,
    shift_posterior,
    sigmoid_variance,
)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


MEANS = [-1.0, 0.5, 2.0, 0.0]
REWARDS = [1.0, 0.3, math.nan, 0.0]


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def test_log_likelihood_equals_plain_loop():
    shifts = shift_grid()
    result = shift_log_likelihood(doubles(MEANS), doubles(REWARDS), shifts)
    for k, s in enumerate(shifts.tolist()):
        for i, (m, r) in enumerate(zip(MEANS, REWARDS, strict=True)):
            v = sigmoid(m + s)
            expected = 0.0 if math.isnan(r) else r * math.log(v) + (1 - r) * math.log(1 - v)
            assert result[k, i].item() == pytest.approx(expected, abs=1e-12)


def test_log_likelihood_of_extreme_logits_is_finite():
    result = shift_log_likelihood(doubles([-800.0, 800.0]), doubles([1.0, 0.0]), doubles([0.0]))
    assert result[0].tolist() == pytest.approx([-800.0, -800.0])


def test_leave_one_out_shift_is_the_posterior_of_the_other_rows():
    shifts = shift_grid()
    likelihood = shift_log_likelihood(doubles(MEANS), doubles(REWARDS), shifts)
    prior = -0.5 * (shifts - 0.3) ** 2
    mean, variance = leave_one_out_shift(likelihood, prior, shifts)
    for i in range(len(MEANS)):
        others = [j for j in range(len(MEANS)) if j != i]
        expected_mean, expected_variance = shift_posterior(likelihood[:, others], prior, shifts)
        assert mean[i].item() == pytest.approx(expected_mean.item(), abs=1e-12)
        assert variance[i].item() == pytest.approx(expected_variance.item(), abs=1e-12)


@pytest.mark.parametrize("mean", [-6.0, -1.0, 0.0, 2.5])
@pytest.mark.parametrize("variance", [0.0, 0.01, 1.0, 16.0, 100.0])
def test_moments_of_a_sigmoid_are_those_of_the_integral(mean, variance):
    x = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    weight = torch.softmax(-(x**2) / 2, dim=0)
    value = torch.sigmoid(mean + math.sqrt(variance) * x)
    expected = float((weight * value).sum())
    spread = float((weight * (value - expected) ** 2).sum())
    assert float(expected_sigmoid(doubles(mean), doubles(variance))) == pytest.approx(expected, abs=0.013)
    assert float(sigmoid_variance(doubles(mean), doubles(variance))) == pytest.approx(spread, abs=0.013)


def test_a_beta_belief_does_not_depend_on_how_rollouts_are_split_into_batches():
    """Two rollouts of a prompt at once, or one after the other, where no shift moves the value in between."""
    mean, variance, one = doubles([-1.0]), doubles([0.7]), doubles([1.0])
    value = torch.sigmoid(mean)
    at_once = beta_update(mean, variance, value, 1.0 - 2 * value, 2 * one)
    first, spread = beta_update(mean, variance, value, 1.0 - value, one)
    second = beta_update(first, spread, torch.sigmoid(first), -torch.sigmoid(first), one)
    torch.testing.assert_close(second, at_once, rtol=1e-12, atol=0)


def test_filter_update_broadcasts_over_drifts():
    mean, variance = filter_update(
        doubles([[0.0, 1.0], [0.5, 1.0]]),
        doubles([[4.0, 1.0], [2.0, 0.0]]),
        doubles([[0.5, -0.2], [0.5, -0.2]]),
        doubles([[0.25, 0.5], [0.25, 0.5]]),
    )
    assert variance.flatten().tolist() == pytest.approx([4 / 2, 1 / 1.5, 2 / 1.5, 0.0])
    assert mean.flatten().tolist() == pytest.approx([0.5 * 2, 1 - 0.2 / 1.5, 0.5 + 0.5 * 2 / 1.5, 1.0])


def test_prequential_update_equals_plain_loop():
    before, forgetting = [math.log(0.7), math.log(0.3)], 0.9
    values = [[0.6, 0.2, 0.5, 0.1], [0.9, 0.4, 0.1, 0.3]]
    after = []
    for w, row in zip(before, values, strict=True):
        log = forgetting * w
        for v, r in zip(row, REWARDS, strict=True):
            if not math.isnan(r):
                log += r * math.log(v) + (1 - r) * math.log(1 - v)
        after.append(log)
    total = math.log(sum(math.exp(w) for w in after))
    result = prequential_update(doubles(before), doubles(values), doubles(REWARDS), forgetting)
    assert result.tolist() == pytest.approx([w - total for w in after])
