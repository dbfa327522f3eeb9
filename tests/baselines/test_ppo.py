"""PPO's critic as a baseline: advantages, whitening, targets of the loss, what is reported."""

import math
from functools import partial

import pytest
import torch

from basis_rl.baselines import Ppo, Sao
from basis_rl.conformance.baselines import example_batch
from basis_rl.functional.gae import gae, reward_to_go
from tests.functional.test_gae import by_loops

IDS = [f"prompt-{i}" for i in range(8)]


def batch_and_mask(**changes):
    batch = example_batch(Ppo(), IDS)
    kl = 0.1 * torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(5)) * batch.action_mask
    batch = type(batch)(**{**vars(batch), "kl": kl, **changes})
    return batch, batch.action_mask & ~batch.rewards.isnan()[:, None]


def test_whitening_is_over_the_action_tokens_that_count():
    batch, counts = batch_and_mask()
    plain, white = (Ppo(lam=0.9, whiten_advantages=on).advantages(batch).values for on in (False, True))
    values = plain[counts]
    deviation = math.sqrt(sum(float(v - values.mean()) ** 2 for v in values) / len(values))
    torch.testing.assert_close(white[counts], (values - values.mean()) / deviation, rtol=1e-6, atol=0)
    assert (white[~counts] == 0).all()


def by_rows(batch, gamma, lam_of):
    """The plain loop of `tests.functional.test_gae`, with a lambda for each number of actions."""
    given = (batch.rewards, batch.values, batch.action_mask, batch.kl)
    found = []
    for row, actions in enumerate(batch.action_mask.sum(dim=1).tolist()):
        alone = (each[row : row + 1] for each in given)
        found.append(by_loops(*alone, gamma, lam_of(max(actions, 1))))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("make", "gamma", "lam_of", "critic_lam"),
    [
        (partial(Ppo, lam=1.0), 1.0, lambda actions: 1.0, 1.0),
        (partial(Ppo, lam=0.9), 0.99, lambda actions: 0.9, 0.9),
        (partial(Ppo, lam=0.9, critic_lam=1.0), 1.0, lambda actions: 0.9, 1.0),
        (partial(Ppo, lam=0.0, critic_lam=0.5), 1.0, lambda actions: 0.0, 0.5),
        (partial(Sao, lam_alpha=1.5), 1.0, lambda actions: max(1 - 1 / (1.5 * actions), 0.0), 1.0),
        (partial(Sao, lam_alpha=0.4), 0.9, lambda actions: max(1 - 1 / (0.4 * actions), 0.0), 1.0),
    ],
)
def test_advantages_and_targets_are_those_of_a_plain_loop(make, gamma, lam_of, critic_lam):
    """Between tool output and of rows without an action; targets are the estimates plus the old values, and a module
    that predicts them has no loss and no gradient."""
    mask = batch_and_mask()[0].action_mask
    holes = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) < 0.8
    batch, counts = batch_and_mask(action_mask=mask & holes, turn_rewards=None)
    baseline = make(gamma=gamma, cliprange_value=None, whiten_advantages=False)
    found = baseline.advantages(batch)
    torch.testing.assert_close(found.values, by_rows(batch, gamma, lam_of), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.baseline[counts], batch.values.double()[counts])
    targets = by_rows(batch, gamma, lambda actions: critic_lam) + batch.values
    predicted = targets.float().requires_grad_()
    loss = baseline.loss(predicted, batch)
    (gradient,) = torch.autograd.grad((loss.per_token * loss.counts).sum(), predicted)
    assert torch.equal(loss.counts, counts)
    assert float(gradient[counts].abs().max()) < 1e-6
    assert float(baseline.loss(predicted.detach() + 1.0, batch).per_token[counts].min()) == pytest.approx(0.5, abs=1e-5)


def test_turns_have_their_own_rewards():
    batch, _ = batch_and_mask()
    given = (batch.rewards, batch.values, batch.action_mask, batch.kl, batch.turn_rewards)
    found = Ppo(lam=0.9, whiten_advantages=False).advantages(batch).values
    torch.testing.assert_close(found, gae(*given, gamma=1.0, lam=0.9), rtol=0, atol=1e-12)


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
