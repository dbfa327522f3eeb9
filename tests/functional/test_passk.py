"""pass@k, maj@k and the paired test against exact enumeration; intervals that cover what they should."""

import itertools
from collections import Counter
from fractions import Fraction

import pytest
import torch

from basis_rl.functional.passk import bootstrap_interval, compare_paired, majority_at_k, pass_at_k, sign_flip_p_value


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def subsets(n, k):
    return list(itertools.combinations(range(n), k))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    counts = torch.arange(n + 1)
    for k in range(1, n + 1):
        expected = [sum(min(s) < c for s in subsets(n, k)) / len(subsets(n, k)) for c in counts.tolist()]
        torch.testing.assert_close(pass_at_k(n, counts, k), f64(expected), rtol=1e-12, atol=1e-12)


def test_pass_at_k_stays_exact_for_many_samples():
    c, n, k = torch.tensor([0, 1, 7, 9_500]), 10_000, 512
    exact = []
    for right in c.tolist():
        missed = Fraction(1)
        for i in range(k):
            missed *= Fraction(max(0, n - right - i), n - i)
        exact.append(float(1 - missed))
    torch.testing.assert_close(pass_at_k(n, c, k), f64(exact), rtol=1e-10, atol=0)


def vote(votes, correct, chosen):
    """One majority vote by the definition; the winners of a tie share."""
    counts = Counter(votes[i] for i in chosen if votes[i] >= 0)
    if not counts:
        return 0.0
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    value = {v: sum(c for w, c in zip(votes, correct, strict=True) if w == v) / votes.count(v) for v in set(votes)}
    return sum(value[winner] for winner in winners) / len(winners)


@pytest.mark.parametrize("seed", range(12))
def test_majority_at_k_is_the_mean_over_all_subsets(seed):
    generator = torch.Generator().manual_seed(seed)
    n = 9
    votes = torch.randint(-1, [2, 3, 5, 9][seed % 4], (4, n), generator=generator)
    right = torch.randint(-1, 4, (4, 2), generator=generator)  # two right answers now and then
    correct = (votes[:, :, None] == right[:, None, :]).any(dim=2) & (votes >= 0)
    for k in range(1, n + 1):
        expected = [
            sum(vote(v, c, s) for s in subsets(n, k)) / len(subsets(n, k))
            for v, c in zip(votes.tolist(), correct.double().tolist(), strict=True)
        ]
        torch.testing.assert_close(majority_at_k(votes, correct, k), f64(expected), rtol=1e-10, atol=1e-12)


def test_an_answer_that_was_graded_differently_counts_by_its_mean():
    votes, correct = torch.tensor([[0, 0, 0, 1]]), torch.tensor([[True, True, False, False]])
    assert majority_at_k(votes, correct, 4).item() == pytest.approx(2 / 3)


def test_thousands_of_samples_do_not_overflow():
    votes = torch.zeros(1, 3000).long()
    votes[0, :1000] = 1
    assert majority_at_k(votes, votes == 0, 3).item() == pytest.approx(1 - 7 / 27, abs=1e-3)
    assert majority_at_k(votes, votes == 0, 3000).item() == 1.0


@pytest.mark.parametrize("k", [0, 5])
def test_k_must_be_possible(k):
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(4, torch.tensor([1]), k)
    with pytest.raises(ValueError, match="1 <= k <= n"):
        majority_at_k(torch.zeros(1, 4).long(), torch.ones(1, 4), k)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for seed in range(300):
        solved = torch.rand(60, generator=generator) ** 2  # difficulties: mean 1/3
        low, high = bootstrap_interval(solved, level=0.9, resamples=400, seed=seed)
        covered += low <= 1 / 3 <= high
    assert 0.84 <= covered / 300 <= 0.94


def test_the_interval_is_seeded_and_widens_with_the_level():
    values = torch.arange(20) / 20
    assert bootstrap_interval(values) == bootstrap_interval(values)
    narrow, wide = bootstrap_interval(values, level=0.5), bootstrap_interval(values, level=0.99)
    assert wide[0] < narrow[0] < float(values.mean()) < narrow[1] < wide[1]
    assert bootstrap_interval(torch.ones(5)) == (1.0, 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_the_p_value_is_that_of_all_sign_flips(seed):
    generator = torch.Generator().manual_seed(seed)
    d = torch.randint(-3, 5, (9,), generator=generator) * (2 if seed % 2 else 1)
    sums = [
        sum(s * x for s, x in zip(signs, d.tolist(), strict=True)) for signs in itertools.product((-1, 1), repeat=9)
    ]
    expected = sum(abs(x) >= abs(int(d.sum())) for x in sums) / len(sums)
    assert sign_flip_p_value(d) == pytest.approx(expected, abs=1e-12)


def test_no_difference_is_no_evidence():
    assert sign_flip_p_value(torch.zeros(4).long()) == 1.0
    same = compare_paired(torch.tensor([1, 2]), torch.tensor([2, 4]), (2, 4))
    assert (same.difference, same.p_value, same.num_problems) == (0.0, 1.0, 2)


def test_a_comparison_takes_different_numbers_of_samples():
    a, b = torch.tensor([0, 1, 2, 1, 0, 0]), torch.tensor([3, 2, 3, 3, 1, 3])
    result = compare_paired(a, b, (2, 3))
    assert result.difference == pytest.approx(float((b / 3 - a / 2).mean()))
    assert result.low <= result.difference <= result.high
    assert result.p_value == sign_flip_p_value(b * 2 - a * 3)
    assert compare_paired(b, a, (3, 2)).p_value == result.p_value
