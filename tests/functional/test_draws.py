"""Draws with known chances, against a plain search for the chances and against many draws."""

from itertools import product

import pytest
import torch

from basis_rl.functional.selection import allocation, effective_number, inclusion_probabilities, systematic_sample


def by_bisection(weights, size):
    """``c`` such that ``sum_i min(1, c w_i) = size``, found by halving an interval."""
    low, high = 0.0, size / float(weights[weights > 0].min())
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if float((c * weights).clamp(max=1).sum()) < size else (low, c)
    return (high * weights).clamp(max=1)


@pytest.mark.parametrize("size", [1, 3, 7, 8])
@pytest.mark.parametrize("power", [0.0, 1.0, 6.0])
def test_chances_are_those_of_a_plain_search(size, power):
    weights = torch.linspace(0.2, 2.0, 8, dtype=torch.float64) ** power
    found = inclusion_probabilities(weights, size)
    assert torch.allclose(found, by_bisection(weights, size), atol=1e-9)
    assert float(found.sum()) == pytest.approx(size, abs=1e-9)
    order = torch.randperm(8)
    assert torch.allclose(inclusion_probabilities(weights[order], size), found[order])
    assert torch.allclose(inclusion_probabilities(weights * 1e-300, size), found)


@pytest.mark.parametrize(
    ("weights", "size", "chances"),
    [
        ([0.0, 1e9, 1.0, 1.0, 0.0, 1e9], 3, [0, 1, 0.5, 0.5, 0, 1]),
        ([1e17, 1.0, 1.0], 2, [1, 0.5, 0.5]),  # a sum of all less the heaviest would be 0
        ([1.0, 0.0, 0.0, 1e-310], 2, [1, 0, 0, 1]),
        ([1.0, 1e-310, 1e-310, 0.0], 2, [1, 0.5, 0.5, 0]),
    ],
)
def test_prompts_without_weight_are_never_drawn_and_heavy_ones_always(weights, size, chances):
    found = inclusion_probabilities(torch.tensor(weights, dtype=torch.float64), size)
    assert found.tolist() == pytest.approx(chances)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0, -1.0, 1.0], "1 of 3 weights are negative"),
        ([1.0, float("nan"), float("inf")], "2 of 3 weights"),
        ([0.0, 0.0, 1.0], "1 prompts have a positive weight, and a batch takes 2"),
        ([1e200, 1e-200, 1e-200], r"1 prompts have a positive weight \(2 more vanish beside the largest one\)"),
    ],
)
def test_weights_that_make_no_draw_are_refused(weights, said):
    with pytest.raises(ValueError, match=said):
        inclusion_probabilities(torch.tensor(weights, dtype=torch.float64), 2)


def test_a_systematic_sample_has_the_chances_that_it_was_given():
    chances = inclusion_probabilities(torch.tensor([5.0, 1.0, 2.0, 0.0, 1.0, 0.2]), 3)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([systematic_sample(chances, generator) for _ in range(8000)])
    assert all(len(set(row)) == 3 for row in draws.tolist())
    share = torch.bincount(draws.flatten(), minlength=6) / 8000
    assert (share - chances).abs().max() < 4 * (0.25 / 8000) ** 0.5
    assert share[3] == 0
    first = torch.bincount(draws[:, 0], minlength=6) / 8000  # the order says nothing
    assert (first - chances / 3).abs().max() < 4 * (0.25 / 8000) ** 0.5


def test_the_effective_number_is_that_of_equal_weights():
    assert effective_number(torch.tensor([2.0, 2.0, 0.0, 2.0])) == pytest.approx(3)
    assert effective_number(torch.tensor([1.0, 0.0])) == 1
    assert effective_number(torch.tensor([3.0, 1.0])) == pytest.approx(16 / 10)


def test_every_pair_can_be_drawn_together():
    """On a line in a fixed order, neighbours whose chances sum to at most 1 never are."""
    chances = torch.full((4,), 0.5)
    generator = torch.Generator().manual_seed(0)
    pairs = {tuple(sorted(systematic_sample(chances, generator).tolist())) for _ in range(100)}
    assert len(pairs) == 6


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize(
    "variances", [[0.25, 0.01, 0.16, 0.09], [0.2, 0.2, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0], [1e-9, 0.25, 1e-9, 1e-9]]
)
def test_no_other_division_of_the_rollouts_has_less_variance(variances, least):
    """All of them, by plain loops."""
    most = 5
    found = {}
    for counts in product(range(least, most + 1), repeat=4):
        loss = sum(variance / count for variance, count in zip(variances, counts, strict=True))
        found.setdefault(sum(counts), []).append(loss)
    for total, losses in found.items():
        counts = allocation(torch.tensor(variances), total, least, most).tolist()
        assert sum(counts) == total
        assert least <= min(counts)
        assert max(counts) <= most
        loss = sum(variance / count for variance, count in zip(variances, counts, strict=True))
        assert loss == pytest.approx(min(losses), rel=1e-6)


def test_rollouts_are_in_proportion_to_the_deviation_and_alike_among_equals():
    deviations = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert allocation(deviations**2, 1000, 1, 1000).tolist() == [100, 200, 300, 400]
    assert allocation(torch.full((4,), 0.2), 14, 1, 8).tolist() == [4, 4, 3, 3]
    assert allocation(torch.zeros(3), 7, 2, 9).tolist() == [3, 2, 2]
