"""Logistic regression against the log-posterior, written out, and features that depend on the words alone."""

import pytest
import torch

from basis_rl.functional.regression import hashed_words, logistic_posterior, predicted_logits


def test_the_posterior_is_the_maximum_and_the_curvature_there():
    """Of the log-posterior of the docstring, summed row by row; from near and from afar."""
    torch.manual_seed(0)
    f, n, variance = 5, 40, 2.0
    phi, rewards, offsets = 2 * torch.randn(n, f).double(), torch.rand(n).double(), torch.randn(n).double()
    counts = torch.randint(1, 5, (n,)).double()

    def loss(w):
        total = w @ w / (2 * variance)
        for row, reward, count, offset in zip(phi, rewards, counts, offsets, strict=True):
            value = 1 / (1 + torch.exp(-(row @ w + offset)))
            total = total - count * (reward * torch.log(value) + (1 - reward) * torch.log(1 - value))
        return total

    near, covariance = logistic_posterior(torch.zeros(f).double(), phi, rewards, counts, offsets, variance)
    curvature = torch.autograd.functional.hessian(loss, near)
    assert torch.autograd.functional.jacobian(loss, near).abs().max() < 1e-2
    torch.testing.assert_close(covariance, torch.linalg.inv(curvature))
    far, _ = logistic_posterior(torch.full((f,), -30.0).double(), phi, rewards, counts, offsets, variance)
    torch.testing.assert_close(far, near, atol=1e-2, rtol=0)
    logit, spread = predicted_logits(near, covariance, phi)
    torch.testing.assert_close(logit, phi @ near)
    torch.testing.assert_close(spread, (phi @ covariance @ phi.T).diagonal())


def test_nothing_is_learnt_from_nothing():
    none = torch.zeros(0).double()
    mean, covariance = logistic_posterior(torch.zeros(2).double(), torch.zeros(0, 2).double(), none, none, none, 3.0)
    assert mean.tolist() == [0, 0]
    torch.testing.assert_close(covariance, 3.0 * torch.eye(2).double())


def test_failures_of_one_text_count_as_one_over_their_number():
    """Ten times as many: a filter that keeps mean and covariance alone would leave a third of the value."""

    def value(failures):
        zeros = torch.zeros(failures).double()
        mean, _ = logistic_posterior(
            torch.zeros(1).double(), torch.ones(failures, 1).double(), zeros, zeros + 1, zeros, 3.0
        )
        return float(torch.sigmoid(mean))

    assert value(1000) < value(100) / 6
    assert value(100) < value(10) / 5


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
