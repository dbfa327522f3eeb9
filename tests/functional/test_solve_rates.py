"""Groups without variance: against sums over all outcomes, and on prompts whose chances are known."""

from math import prod

import pytest
import torch
from scipy.stats import betabinom

from basis_rl.functional.passk import fit_beta, without_variance


def rising(start, size):
    return prod(start + i for i in range(size))


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_the_chance_is_that_of_equal_draws_from_an_urn(size):
    # Polya's urn: each draw makes its like more probable.
    for a, b in ((0.1, 0.3), (2.0, 5.0), (40.0, 1.0)):
        expected = (rising(a, size) + rising(b, size)) / rising(a + b, size)
        found = without_variance(torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64), size)
        assert float(found) == pytest.approx(expected, rel=1e-9)


def likelihood(a, b, successes, counts):
    return betabinom.logpmf(successes.numpy(), counts.numpy(), a, b).sum()


@pytest.mark.parametrize("truth", [(0.3, 0.6), (5.0, 2.0), (0.1, 2.0)])
def test_the_fit_is_as_likely_as_the_truth_and_predicts_groups(truth):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(3)
    p = torch.distributions.Beta(*map(torch.tensor, truth)).sample((3_000,)).double()
    counts = torch.randint(2, 9, (3_000,), generator=generator)
    successes = torch.binomial(counts.double(), p)
    fitted = fit_beta(successes, counts)
    assert likelihood(*fitted, successes, counts) >= likelihood(*truth, successes, counts) - 1
    a = fitted[0] + successes
    b = fitted[1] + counts - successes
    for size in (2, 8, 16):
        real = (p**size + (1 - p) ** size).mean()
        assert float(without_variance(a, b, size).mean()) == pytest.approx(float(real), abs=0.02)
        # Also of the prompts that a sampler would choose by the same rewards.
        middle = ((successes / counts) - 0.5).abs() < 0.3
        real = (p**size + (1 - p) ** size)[middle].mean()
        assert float(without_variance(a, b, size)[middle].mean()) == pytest.approx(float(real), abs=0.02)


def test_prompts_in_another_order_and_counted_twice_give_the_same_fit():
    successes = torch.tensor([0.0, 1, 4, 2, 0, 3])
    counts = torch.tensor([4, 4, 4, 2, 1, 4])
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    expected = fit_beta(successes, counts)
    assert fit_beta(successes[order], counts[order]) == expected
    assert fit_beta(successes.repeat(2), counts.repeat(2)) == expected
