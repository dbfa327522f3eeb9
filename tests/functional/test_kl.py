"""KL estimators: what they are in expectation, as values and as losses, by enumeration."""

import torch

from basis_rl.functional.objectives import kl_estimate


def policies():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    return logits, ref


def expected_gradient(estimator):
    """Sum over all outcomes of pi (held fixed: samples carry no gradient) times the gradient of the estimate."""
    logits, ref = policies()
    log_probs = logits.log_softmax(-1)
    loss = (log_probs.exp().detach() * kl_estimate(log_probs, ref, estimator)).sum()
    return torch.autograd.grad(loss, logits)[0]


def test_k1_and_k3_are_unbiased_values():
    logits, ref = policies()
    log_probs = logits.log_softmax(-1).detach()
    reverse = (log_probs.exp() * (log_probs - ref)).sum()
    for estimator in ("k1", "k3"):
        assert torch.allclose((log_probs.exp() * kl_estimate(log_probs, ref, estimator)).sum(), reverse)


def test_k1_as_a_loss_pulls_nowhere():
    assert expected_gradient("k1").abs().max() < 1e-12


def test_k2_as_a_loss_is_the_gradient_of_the_reverse_kl():
    logits, ref = policies()
    log_probs = logits.log_softmax(-1)
    reverse = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits)[0]
    torch.testing.assert_close(expected_gradient("k2"), reverse)


def test_k3_as_a_loss_is_the_gradient_of_the_forward_kl():
    logits, ref = policies()
    forward = torch.autograd.grad((ref.exp() * (ref - logits.log_softmax(-1))).sum(), logits)[0]
    torch.testing.assert_close(expected_gradient("k3"), forward)
