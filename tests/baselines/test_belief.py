"""What baselines believe about values: from the batches before, in reward units, as uncertain as it is."""

import math

import pytest
import torch

from basis_rl.baselines import Basis, BasisHistory, BVBlend
from basis_rl.values import ValueTable
from tests.support.batches import batch_of

TABLE = ValueTable.from_rewards({"a": [1, 0, 0, 0], "b": [1, 1, 0, 0, 1, 1, 0, 0], "c": [1, 1, 1, 0]})


def test_a_table_is_believed_at_the_beta_that_explains_the_rewards():
    found = Basis(TABLE)
    p = torch.tensor([1.5 / 5, 4.5 / 9, 3.5 / 5], dtype=torch.float64)
    mean, variance = found.believed("abc")
    torch.testing.assert_close(mean, p)
    torch.testing.assert_close(variance, p * (1 - p) / (torch.tensor([4.0, 8, 4]).double() + 2))
    losses = []
    curve = torch.zeros(230, dtype=torch.float64)
    for rewards in ([1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]):
        found.update(batch_of(rewards, "abc"))
        losses = []
        for beta in found.betas.tolist():
            v = torch.sigmoid(torch.logit(p) + 1 / beta).clamp(1e-6, 1 - 1e-6)
            r = torch.tensor(rewards).double()
            losses.append(float(-(r * v.log() + (1 - r) * (1 - v).log()).mean()))
        curve = 0.9 * curve + torch.tensor(losses, dtype=torch.float64)
    beta = float(found.betas[curve.argmin()])
    mean, variance = found.believed("abc")
    v = torch.sigmoid(torch.logit(p) + 1 / beta)
    torch.testing.assert_close(mean, v)
    torch.testing.assert_close(variance, (v * (1 - v)) ** 2 / (p * (1 - p) * (torch.tensor([4.0, 8, 4]).double() + 2)))


def test_rewards_that_the_refinement_explains_at_any_beta_do_not_mislead_the_belief():
    """Rewards that have nothing to do with the table, half of them right: values that average a half, not one."""
    generator, found = torch.Generator().manual_seed(0), Basis(TABLE)
    for step in range(20):
        found.update(batch_of(torch.randint(0, 2, (3,), generator=generator).float().tolist(), "abc", step=step))
    assert float(found.believed("abc")[0].mean()) == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("belief", ["beta", "gaussian"])
def test_history_is_believed_as_a_mixture_over_its_drifts(belief):
    """Against draws: a drift by its weight, a logit of the prompt and of the shift, the value."""
    found = BasisHistory(TABLE, belief=belief)
    for step in range(6):
        found.update(batch_of([1.0, float(step % 2), 1.0], "abc", step=step))
    torch.manual_seed(0)
    mean, variance, _ = found._belief("abcz")
    which = torch.multinomial(found.log_weights.exp(), 400_000, replacement=True)
    shift = found.shift_mean + math.sqrt(found.shift_variance + found.shift_drift) * torch.randn(len(which), 4).double()
    if belief == "gaussian":
        drawn = torch.sigmoid(mean[which] + variance[which].sqrt() * torch.randn(len(which), 4).double() + shift)
    else:  # a Beta about the shifted value, with so many rollouts behind it
        now = torch.sigmoid(mean + found.shift_mean)
        behind = (1 / (variance * now * (1 - now)))[which]
        value = torch.sigmoid(mean[which] + shift)
        drawn = torch.distributions.Beta(behind * value, behind * (1 - value)).sample()
    torch.testing.assert_close(found.believed("abcz")[0], drawn.mean(0), rtol=0, atol=0.02)
    torch.testing.assert_close(found.believed("abcz")[1], drawn.var(0), rtol=0, atol=0.02)
    assert found.believed("z")[1] > found.believed("a")[1]  # never seen


@pytest.mark.parametrize("belief", ["beta", "gaussian"])
def test_a_mixture_has_the_moments_of_its_filters_and_the_shift_has_drifted_for_a_step(belief):
    found = BasisHistory(TABLE, belief=belief, shift_drift=0.5)
    for step in range(2):
        found.update(batch_of([1.0, float(step % 2), 1.0], "abc", step=step))
    found.mean[:] += torch.linspace(-2.0, 2.0, 6)[:, None]
    alone = []
    for one in torch.eye(6).double():
        found.log_weights = one.log()
        alone.append(torch.stack(found.believed("abcz")))
    means, variances = torch.stack(alone, dim=1)
    weights = torch.softmax(torch.arange(6.0), dim=0).double()
    found.log_weights = weights.log()
    mean = weights @ means
    expected = mean, weights @ (variances + means**2) - mean**2
    torch.testing.assert_close(found.believed("abcz"), expected)
    found.shift_variance, found.shift_drift = found.shift_variance + 0.5, 0.0
    torch.testing.assert_close(found.believed("abcz"), expected)


def test_a_cluster_is_believed_as_its_history():
    found = BVBlend({"a": 0, "b": 0, "c": 1}, decay=0.5, prior_variance=0.2)
    mean, variance = found.believed(["a", "nobody"])
    assert mean.tolist() == [0.5, 0.5]
    assert variance.tolist() == pytest.approx([0.2, 0.2])
    found.update(batch_of([1.0, 0.0], "ab"))
    found.update(batch_of([1.0, 1.0], "ab", step=1))
    assert found.reward_range == (0.0, 1.0)
    m1 = 0.5 * 0.5 + 0.5 * 1.0
    m2 = 0.5 * (0.25 + 0.2) + 0.5 * 1.0
    mean, variance = found.believed(["b", "c"])
    assert mean.tolist() == pytest.approx([m1, 0.5])
    assert variance.tolist() == pytest.approx([m2 - m1**2, 0.2])
