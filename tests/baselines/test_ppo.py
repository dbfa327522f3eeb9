"""PPO's critic as a baseline: advantages, whitening, targets of the loss, what is reported."""

import math

import pytest
import torch

from basis_rl.baselines import Ppo
from basis_rl.conformance.baselines import example_batch
from basis_rl.functional.gae import gae, reward_to_go

IDS = [f"prompt-{i}" for i in range(8)]


def batch_and_mask(**changes):
    batch = example_batch(Ppo(), IDS)
    kl = 0.1 * torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(5)) * batch.action_mask
    batch = type(batch)(**{**vars(batch), "kl": kl, **changes})
    return batch, batch.action_mask & ~batch.rewards.isnan()[:, None]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.9)])
def test_advantages_are_gae_and_the_baseline_is_the_value(gamma, lam):
    batch, counts = batch_and_mask()
    result = Ppo(gamma=gamma, lam=lam, whiten_advantages=False).advantages(batch)
    given = (batch.rewards, batch.values, batch.action_mask, batch.kl, batch.turn_rewards)
    expected = gae(*given, gamma=gamma, lam=lam)
    torch.testing.assert_close(result.values, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.baseline[counts], batch.values.double()[counts])


def test_whitening_is_over_the_action_tokens_that_count():
    batch, counts = batch_and_mask()
    plain, white = (Ppo(lam=0.9, whiten_advantages=on).advantages(batch).values for on in (False, True))
    values = plain[counts]
    deviation = math.sqrt(sum(float(v - values.mean()) ** 2 for v in values) / len(values))
    torch.testing.assert_close(white[counts], (values - values.mean()) / deviation, rtol=1e-6, atol=0)
    assert (white[~counts] == 0).all()


@pytest.mark.parametrize(("lam", "critic_lam", "used"), [(0.9, None, 0.9), (0.9, 1.0, 1.0), (0.0, 0.5, 0.5)])
def test_targets_have_a_lambda_of_their_own(lam, critic_lam, used):
    """A module that predicts the targets has no loss and no gradient; those are the estimates plus the old values."""
    batch, counts = batch_and_mask()
    baseline = Ppo(lam=lam, critic_lam=critic_lam, cliprange_value=None)
    given = (batch.rewards, batch.values, batch.action_mask, batch.kl, batch.turn_rewards)
    targets = gae(*given, gamma=1.0, lam=used) + batch.values
    predicted = targets.float().requires_grad_()
    loss = baseline.loss(predicted, batch)
    (gradient,) = torch.autograd.grad((loss.per_token * loss.counts).sum(), predicted)
    assert torch.equal(loss.counts, counts)
    assert float(gradient[counts].abs().max()) < 1e-6
    assert float(baseline.loss(predicted.detach() + 1.0, batch).per_token[counts].min()) == pytest.approx(0.5, abs=1e-5)


def test_explained_variance_is_of_the_return_not_of_the_targets():
    """With lambda 0 the targets hold the value itself, and a useless critic would seem to explain them."""
    batch, counts = batch_and_mask(kl=None)
    useless = type(batch)(**{**vars(batch), "values": torch.rand(batch.values.shape) * 10})
    found = Ppo(lam=0.0).advantages(useless).metrics["explained_variance"]
    returns = reward_to_go(batch.rewards, None, batch.action_mask, batch.turn_rewards)[counts]
    errors = returns - useless.values.double()[counts]
    assert found == pytest.approx(1.0 - float(errors.var(correction=0) / returns.var(correction=0)))


def test_the_policy_waits_for_as_many_batches():
    assert [Ppo(critic_warmup_steps=2).policy_waits(step) for step in range(4)] == [True, True, False, False]
    assert not Ppo().policy_waits(0)
