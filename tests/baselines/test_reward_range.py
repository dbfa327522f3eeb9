"""Rewards of any range: beliefs learn it from the batches before, and are in reward units."""

import math

import pytest
import torch

from basis_rl.baselines import BasisHistory, Spo
from basis_rl.baselines.base import less_baseline
from basis_rl.baselines.reward_range import RewardRange
from basis_rl.rewards.base import RewardError, check_reward, declared_range
from basis_rl.rewards.registry import build_reward
from basis_rl.types import RunContext
from basis_rl.values import ValueTable
from tests.support.batches import batch_of

IDS = [f"p{i}" for i in range(12)]
KINDS = {
    "basis_history": BasisHistory,
    "gaussian": lambda **given: BasisHistory(belief="gaussian", lcb=1.0, **given),
    "text": lambda **given: BasisHistory(prior="text", **given),
    "optimal": lambda **given: BasisHistory(target="optimal", **given),
    "optimal of each token": lambda **given: Spo(target="optimal_token", normalize=False, **given),
    "spo": Spo,
    "spo without its mean": lambda **given: Spo(normalize=False, **given),
}


def batches(count=5, scale=1.0, offset=0.0):
    """Half right, half wrong from the first batch on, in ``offset + scale * {0, 1}``."""
    generator = torch.Generator().manual_seed(0)
    for step in range(count):
        drawn = (torch.rand(12, generator=generator, dtype=torch.float64) < torch.linspace(0, 1, 12)).double()
        fields = {"prompt_texts": [f"What is {name}?" for name in IDS], "gradient_energies": torch.ones((12, 2))}
        yield batch_of(offset + scale * drawn, IDS, step=step, **fields)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scale", "offset"), [(2.0, -1.0), (0.1, 0.0), (10.0, 3.0)])
def test_a_belief_that_learns_the_range_is_that_of_0_and_1_in_other_units(kind, scale, offset):
    plain, other = KINDS[kind](), KINDS[kind]()
    for batch, scaled in zip(batches(), batches(scale=scale, offset=offset), strict=True):
        first, second = plain.advantages(batch), other.advantages(scaled)
        torch.testing.assert_close(second.baseline, offset + scale * first.baseline)
        plain.update(batch)
        other.update(scaled)
        mean, variance = plain.believed(IDS)
        torch.testing.assert_close(other.believed(IDS)[0], offset + scale * mean)
        torch.testing.assert_close(other.believed(IDS)[1], scale**2 * variance)
    assert other.reward_range == pytest.approx((offset, offset + scale))


@pytest.mark.parametrize("kind", ["basis_history", "optimal", "spo without its mean"])
def test_until_a_range_is_known_the_baseline_is_the_mean_of_the_others(kind):
    baseline = KINDS[kind]()
    told = (([5.0, 5.0, math.nan, 5.0], [5.0, 5.0, 5.0]), ([5.0, 2.0, math.nan, 8.0], [5.0, 6.5, 3.5]))
    for step, (rewards, others) in enumerate(told):
        batch = batch_of(rewards, IDS[:4], step=step, gradient_energies=torch.ones((4, 2)))
        found = baseline.advantages(batch)
        assert found.baseline[[0, 1, 3]].tolist() == others
        assert found.metrics["range_known"] == 0.0
        assert baseline.reward_range == (0.0, 1.0)
        baseline.update(batch)
    assert baseline.advantages(batch).metrics["range_known"] == 1.0
    assert baseline.reward_range == (2.0, 8.0)
    alone = KINDS[kind]().advantages(batch_of([3.0], ["p0"], gradient_energies=torch.ones((1, 2))))
    assert alone.values.tolist() == [3.0]


@pytest.mark.parametrize("belief", ["beta", "gaussian"])
def test_a_wider_range_leaves_values_and_what_is_behind_them(belief):
    found = BasisHistory(belief=belief, prior="text")
    for batch in batches():
        found.update(batch)
    low, high = found.reward_range
    names = list(found._row)
    now = torch.sigmoid(found._belief(names)[0] + found.shift_mean)
    behind = 1 / (found.variance * now * (1 - now))
    unseen = low + (high - low) / (1 + math.exp(-found.shift_mean))
    found._rescale(*found.range.widen(torch.tensor([-3.0, 2.0])))
    assert found.reward_range == (-3.0, 2.0)
    after = torch.sigmoid(found._belief(names)[0] + found.shift_mean)
    torch.testing.assert_close(-3.0 + 5.0 * after, low + (high - low) * now)
    torch.testing.assert_close(1 / (found.variance * after * (1 - after)), behind)
    assert -3.0 + 5.0 / (1 + math.exp(-found.shift_mean)) == pytest.approx(unseen)


def test_a_wider_range_leaves_trackers():
    found = Spo()
    for batch in batches():
        found.update(batch)
    mean, total = found.believed(IDS)[0], found._tracked(IDS).sum(dim=1)
    found._rescale(*found.range.widen(torch.tensor([-3.0, 2.0])))
    torch.testing.assert_close(found.believed(IDS)[0], mean)
    torch.testing.assert_close(found._tracked(IDS).sum(dim=1), total)


def test_a_table_and_a_declared_range_are_where_it_starts_and_a_fixed_one_stays():
    table = ValueTable.from_rewards({name: [0.0, 1.0] for name in IDS})
    declared = RunContext(prompts={}, provenance={}, reward_range=(-1.0, 0.0))
    fixed, told, tabled = BasisHistory(fixed_range=(0, 1)), BasisHistory(), BasisHistory(table, accept_mismatch=True)
    for found in (fixed, told, tabled):
        found.validate(declared)
    assert [found.reward_range for found in (fixed, told, tabled)] == [(0, 1), (-1, 0), (0, 1)]
    for found in (fixed, told, tabled):
        found.update(batch_of([4.0, 0.5, -0.25], IDS[:3]))
    assert [found.reward_range for found in (fixed, told, tabled)] == [(0, 1), (-1, 4), (-0.25, 4)]
    slack = RewardRange("mine", declared=(0.0, 0.1))
    assert slack.widen(torch.tensor([0.1, 0.0])) is None
    assert slack.span == (0.0, 0.1)
    with pytest.raises(ValueError, match="BasisHistory: fixed_range must be the least and the largest reward"):
        BasisHistory(fixed_range=(1, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_outside_a_fixed_range_are_learnt_as_its_nearer_end(kind):
    """But an advantage is of the reward itself."""
    fields = {"prompt_texts": IDS[:3], "gradient_energies": torch.ones((3, 2))}
    within, outside = (batch_of(rewards, IDS[:3], **fields) for rewards in ([1.0, 0.0, 0.5], [4.0, -3.0, 0.5]))
    plain, other = (KINDS[kind](fixed_range=(0, 1)) for _ in range(2))
    plain.update(within)
    other.update(outside)
    assert torch.equal(plain.believed(IDS)[0], other.believed(IDS)[0])
    assert torch.equal(plain.believed(IDS)[1], other.believed(IDS)[1])
    found = other.advantages(outside)
    if kind != "spo":  # which divides by the deviation of the batch
        torch.testing.assert_close(found.values, less_baseline(outside.rewards, found.baseline))


@pytest.mark.parametrize("kind", ["basis_history", "spo"])
def test_a_table_tells_a_fixed_range_its_values_in_reward_units(kind):
    table = ValueTable.from_rewards({"a": [1.0, 0.5, -0.25], "b": [-0.5, 0.0], "c": [1.0]}, reward_range=(-0.5, 1.0))
    own, wider, narrower = (KINDS[kind](values=table, fixed_range=given) for given in (None, (-1, 1), (0.5, 1)))
    # An expected sigmoid of an uncertain shift depends on the scale.
    own.shift_variance = wider.shift_variance = own.shift_drift = wider.shift_drift = 0.0
    torch.testing.assert_close(wider.believed("abc")[0], own.believed("abc")[0])
    assert bool(narrower.believed("abc")[0].isfinite().all())


def rewarding(given):
    def reward(completions, **kwargs):
        return [1.5] * len(completions)

    reward.reward_range = given
    return reward


def test_the_range_of_a_sum_is_that_of_what_its_parts_declare():
    right, late = build_reward("exact", {}), build_reward("overlong", {"max_completion_length": 8})
    assert declared_range([right]) == (0, 1)
    assert declared_range([right, late]) == (-1, 1)
    assert declared_range([right, late], [2.0, -0.5]) == (0, 2.5)
    assert declared_range([rewarding((1, 2)), rewarding((1, 2))]) == (1, 4)  # one of them may score nothing
    assert declared_range([right, lambda **given: [0.0]]) is None
    assert declared_range([]) is None
    assert declared_range([right], [0.0]) is None
    for wrong in ((1, 0), (0, math.inf), 3, "ab"):
        with pytest.raises(ValueError, match="'reward' must be the least and the largest"):
            declared_range([rewarding(wrong)])


def test_a_reward_outside_what_it_declares_breaks_its_promise():
    check_reward(lambda: rewarding((0, 2)))
    with pytest.raises(RewardError, match="outside its `reward_range`"):
        check_reward(lambda: rewarding((0, 1)))


@pytest.mark.parametrize("forgetting", [0.92, "kl"])
def test_spo_learns_from_rollouts_that_are_not_trained_on(forgetting):
    """Such as truncated ones, whose tokens are masked; of them there is no log-probability to forget by."""
    found = Spo(forgetting=forgetting, fixed_range=(0, 1))
    mask = torch.tensor([[True, True], [False, False], [False, False]])
    log_probs = -torch.ones((3, 2)) if forgetting == "kl" else None
    found.update(batch_of([1.0, 0.0, math.nan], "abc", action_mask=mask, log_probs=log_probs))
    rho = 0.96 if forgetting == "kl" else 0.92  # nothing is known of how far the policy has moved
    assert found.trackers["a"][:2] == pytest.approx((rho * 0.5 + 1, rho * 0.5))
    assert found.trackers["b"][:2] == pytest.approx((0.92 * 0.5, 0.92 * 0.5 + 1))
    assert "c" not in found.trackers
    advantages = found.advantages(batch_of([1.0, 0.0, math.nan], "abc", action_mask=mask)).values
    assert advantages[1:].tolist() == [0.0, 0.0]
