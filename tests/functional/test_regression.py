"""Online logistic regression against the textbook's matrices, and features that depend on the words alone."""

import math

import pytest
import torch

from basis_rl.functional.regression import hashed_words, predicted_logits, regression_update


@pytest.mark.parametrize("copies", [1, 2])
def test_an_update_is_the_information_filters(copies):
    """By inverses, row by row sums, as in the docstring, of fewer and of more rows than features; NaN is left out."""
    torch.manual_seed(0)
    f, n = 5, 4
    phi, rewards = torch.randn(copies * n, f).double(), torch.tensor([1.0, 0.25, math.nan, 0.0] * copies).double()
    root = torch.randn(f, f).double()
    mean, covariance, offset = torch.randn(f).double(), root @ root.T + torch.eye(f), 0.7
    information, gradient = torch.linalg.inv(covariance), torch.zeros(f).double()
    for row, reward in zip(phi, rewards, strict=True):
        if reward.isnan():
            continue
        x, v = float(row @ mean) + offset, float(row @ covariance @ row)
        value = 1 / (1 + math.exp(-x / math.sqrt(1 + math.pi * v / 8)))
        information = information + value * (1 - value) * torch.outer(row, row)
        gradient = gradient + (reward - value) * row
    expected = torch.linalg.inv(information)
    found_mean, found = regression_update(mean, covariance, phi, rewards, offset)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_mean, mean + expected @ gradient)
    logit, variance = predicted_logits(found_mean, found, phi)
    torch.testing.assert_close(logit, phi @ found_mean)
    torch.testing.assert_close(variance, (phi @ expected @ phi.T).diagonal())


def test_nothing_is_learnt_from_nothing():
    mean, covariance = torch.ones(2).double(), torch.eye(2).double()
    same = regression_update(mean, covariance, torch.ones(3, 2).double(), torch.full((3,), math.nan).double())
    assert same[0] is mean
    assert same[1] is covariance


def test_features_are_of_the_words_and_their_neighbours():
    texts = ["What is 7 + 8?", "what IS 7 + 8 ?", "8 + 7 is what?", "", "Prove it."]
    found = hashed_words(texts, 64)
    assert found.shape == (5, 64)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert found[3].abs().sum() == 0
    assert found[[0, 1, 2, 4]].norm(dim=1).tolist() == pytest.approx([1.0] * 4)
    assert found[0] @ found[2] > 0.4 > abs(found[0] @ found[4])
    assert torch.equal(hashed_words(texts[::-1], 64), found.flip(0))
    assert not torch.equal(hashed_words(["a b c"], 64), hashed_words(["a c b"], 64))
    assert (hashed_words(["one two three four five six seven"], 256) < 0).any()  # signs cancel collisions
    # Two of five terms are pairs, which other numbers of the same length share, and longer ones do not.
    first, same, longer = hashed_words(["12 + 345", "67 + 890", "6789 + 8901"], 1 << 14)
    assert first @ same == pytest.approx(3 / 5)
    assert first @ longer == pytest.approx(1 / 5)
