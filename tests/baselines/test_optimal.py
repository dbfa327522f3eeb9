"""The baseline of least variance: its regression as a plain loop, its bias by enumeration."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import build_baseline
from basis_rl.baselines.optimal import OptimalBaseline
from tests.support.batches import batch_of, table_of_counts

CLUSTERS = {f"p{i}": i % 2 for i in range(9)}
MAKE = {
    "basis": lambda target: build_baseline("basis", values=table_of_counts(), calibration="none", target=target),
    "basis_history": lambda target: build_baseline("basis_history", target=target),
    "basis_history, table, lcb": lambda target: build_baseline(
        "basis_history", values=table_of_counts(), lcb=1.0, target=target
    ),
    "spo": lambda target: build_baseline("spo", normalize=False, target=target),
    "bv_blend": lambda target: build_baseline("bv_blend", clusters=CLUSTERS, confidence=1.0, target=target),
    "batch_mean": lambda target: build_baseline("batch_mean", target=target),
}


def random_batch(seed, size=12, tokens=5, rewards=(0.0, 1.0), **fields):
    """Rollouts of some prompts with ragged actions, tool output between them and a missing reward."""
    generator = torch.Generator().manual_seed(seed)
    ids = [f"p{i}" for i in torch.randint(0, 9, (size,), generator=generator).tolist()]
    drawn = torch.tensor(rewards)[torch.randint(0, len(rewards), (size,), generator=generator)]
    drawn[seed % size] = math.nan
    mask = torch.rand((size, tokens), generator=generator) < 0.7
    mask[:, 0] = True
    energies = torch.rand((size, tokens), generator=generator) * mask
    # One rollout had no gradient, and one had a token that outweighs all others.
    energies[(seed + 1) % size] = 0.0
    energies[(seed + 2) % size, 0] = 1000.0
    return batch_of(drawn, ids, action_mask=mask, gradient_energies=energies, step=seed, **fields)


def counted(past):
    """(V, r, weight) of every rollout; `past` has a list of (V, r, W) for each batch."""
    for age, rollouts in enumerate(reversed(past)):
        total = sum(w for *_, w in rollouts)
        capped = [min(w, 10 * (total - w) / (len(rollouts) - 1)) for *_, w in rollouts]
        mean = sum(capped) / len(capped)
        yield from ((v, r, 0.97**age * w / mean) for (v, r, _), w in zip(rollouts, capped, strict=True))


def plain_loop(past, values, degree):
    """c by the normal equations, summed rollout by rollout."""
    d = degree + 1
    left = 4.0 * torch.eye(d, dtype=torch.float64)
    prior = torch.zeros(d, dtype=torch.float64)
    prior[1 if degree else 0] = 1.0 if degree else float(values[0])
    right = 4.0 * prior
    for v, r, w in counted(past):
        x = torch.tensor([v**k for k in range(d)], dtype=torch.float64)
        left += w * torch.outer(x, x)
        right += w * r * x
    return torch.linalg.solve(left, right)


# A value table has the range of its own rewards.
ANY_RANGE = [(name, (-1.0, 1.0, 0.25)) for name in MAKE if name not in ("basis", "basis_history, table, lcb")]


@pytest.mark.parametrize(("name", "rewards"), [*((name, (0.0, 1.0)) for name in MAKE), *ANY_RANGE])
def test_it_is_the_weighted_regression_of_earlier_rewards_on_their_values(name, rewards):
    baseline, value = MAKE[name]("optimal"), MAKE[name]("value")
    low, high = (0.0, 1.0) if name == "batch_mean" else (min(rewards), max(rewards))
    if hasattr(baseline, "range"):
        for each in (baseline, value):
            each.range.declare((low, high))
    if name == "bv_blend":
        # Without a history of the clusters its value is the mean of the group, and holds the own reward.
        for each in (baseline, value):
            each.update(batch_of([low, high] * 2, ["p0", "p0", "p1", "p1"]))
    past = []
    for step in range(4):
        batch = random_batch(step, rewards=rewards)
        told = value.advantages(batch).baseline
        v = (told - low) / (high - low)
        c = plain_loop(past, told, 0 if name == "batch_mean" else 2)
        given = baseline.advantages(batch)
        found = given.baseline
        if step:
            units = [(low + (high - low) * a, low + (high - low) * r, w) for a, r, w in counted(past)]
            least = sum(
                w * (r - low - (high - low) * sum(float(c[k]) * a**k for k in range(len(c)))) ** 2
                for (a, _, _), (_, r, w) in zip(counted(past), units, strict=True)
            )
            assert given.metrics["power_none"] == pytest.approx(sum(w * r**2 for _, r, w in units) / least)
            if name != "batch_mean":
                of_value = sum(w * (r - told) ** 2 for told, r, w in units)
                assert given.metrics["power_value"] == pytest.approx(of_value / least)
        for i in range(len(v)):
            b = sum(float(c[k]) * float(v[i]) ** k for k in range(len(c)))
            inside = b if name == "batch_mean" else min(0.99, max(0.01, b))
            expected = low + (high - low) * inside if step or name == "batch_mean" else float(told[i])
            assert float(found[i]) == pytest.approx(expected, abs=1e-9)
        weights = batch.gradient_energies.double().sum(dim=1).tolist()
        scaled = ((batch.rewards.double() - low) / (high - low)).tolist()
        rows = zip(v.tolist(), scaled, weights, strict=True)
        past.append([(a, r, w) for a, r, w in rows if not math.isnan(r) and w > 0])
        for each in (baseline, value):
            each.update(batch)


def test_each_action_has_the_regression_of_the_rollouts_that_have_it():
    found = OptimalBaseline("optimal_token")
    batches = [random_batch(seed) for seed in range(3)]
    values = [torch.rand(12, generator=torch.Generator().manual_seed(9 + k)).double() for k in range(3)]
    for batch, v in zip(batches, values, strict=True):
        found.learn(v, batch.rewards.double(), batch)
    mask = torch.ones((12, 7), dtype=torch.bool)
    b, _ = found(values[0], mask)
    whole, _ = OptimalBaseline.__call__(found_with(found, "optimal"), values[0], mask)
    # Nobody has had a sixth action.
    assert torch.equal(b[:, 5], whole)
    assert torch.equal(b[:, 6], whole)
    coefficients = found._coefficients(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    for action in range(5):
        left = 4.0 * torch.eye(3, dtype=torch.float64)
        right = 4.0 * coefficients[0]
        for age, (batch, v) in enumerate(zip(batches[::-1], values[::-1], strict=True)):
            totals = batch.gradient_energies.double().sum(dim=1)
            rows = [i for i in range(12) if totals[i] > 0 and not batch.rewards[i].isnan()]
            caps = {i: min(1.0, float(10 * totals[[j for j in rows if j != i]].mean() / totals[i])) for i in rows}
            mean = sum(float(totals[i]) * caps[i] for i in rows) / len(rows)
            for i in rows:
                own = batch.gradient_energies[i][batch.action_mask[i]].double()
                if action < len(own):
                    x = torch.stack([torch.ones_like(v[i]), v[i], v[i] ** 2])
                    w = 0.97**age * own[action] * caps[i] / mean
                    left += w * torch.outer(x, x)
                    right += w * batch.rewards[i].double() * x
        c = torch.linalg.solve(left, right)
        powers = torch.stack([torch.ones_like(values[0]), values[0], values[0] ** 2], dim=1)
        torch.testing.assert_close(b[:, action], (powers @ c).clamp(0.01, 0.99))


def found_with(found, target):
    other = OptimalBaseline(target)
    other.moments = found.moments
    return other


TOKENS = 2


def sequences():
    """Rollouts of up to two tokens of a vocabulary of two: token 0 ends it."""
    return [(0,), (1, 0), (1, 1)]


@pytest.mark.parametrize("target", ["optimal", "optimal_token"])
@pytest.mark.parametrize("name", ["basis_history", "basis_history, table, lcb", "basis", "spo"])
def test_the_gradient_is_unbiased_over_all_outcomes(name, target):
    """Two prompts, a logit for each of two tokens; expectation of the estimate and the gradient of the expectation."""
    logits = torch.tensor([[0.3, -0.8], [-1.1, 0.5]], dtype=torch.float64, requires_grad=True)
    reward = {(0,): 0.2, (1, 0): 1.0, (1, 1): 0.0}
    baseline = MAKE[name](target)
    if hasattr(baseline, "range"):
        baseline.range.declare((0.0, 1.0))
    for seed in range(3):
        baseline.update(random_batch(seed, tokens=2))

    def log_probs(prompt, tokens):
        return torch.stack([torch.nn.functional.logsigmoid(logits[prompt, t] * (1 if y else -1)) for t, y in tokens])

    names = ["p3", "p5"]
    expected = 0.0
    estimate = torch.zeros_like(logits)
    moved = 0.0
    for outcome in itertools.product(sequences(), repeat=2):
        each = [log_probs(prompt, list(enumerate(tokens))) for prompt, tokens in enumerate(outcome)]
        chance = sum(x.sum() for x in each).exp()
        rewards = [reward[tokens] for tokens in outcome]
        expected = expected + chance * sum(rewards)
        mask = torch.tensor([[t < len(tokens) for t in range(TOKENS)] for tokens in outcome])
        found = baseline.advantages(batch_of(rewards, names, action_mask=mask))
        values = found.values if found.values.ndim == 2 else found.values[:, None].expand(2, TOKENS)
        moved += float((found.values - (torch.tensor(rewards)[:, None] if found.values.ndim == 2 else 0)).abs().sum())
        loss = sum((values[i, : len(x)] * x).sum() for i, x in enumerate(each))
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        estimate += chance.detach() * gradient
    (true,) = torch.autograd.grad(expected, logits)
    assert moved > 0
    torch.testing.assert_close(estimate, true, rtol=1e-6, atol=1e-6)


def test_a_wider_range_of_rewards_leaves_the_curve_in_reward_units():
    found = OptimalBaseline("optimal")
    other = OptimalBaseline("optimal")
    for seed in range(40):
        batch = random_batch(seed)
        v = torch.rand(12, generator=torch.Generator().manual_seed(seed)).double()
        found.learn(v, batch.rewards.double(), batch)
        # The same rewards as a part of the range from -1 to 3.
        other.learn(0.25 + 0.25 * v, 0.25 + 0.25 * batch.rewards.double(), batch)
    found.rescale(0.25, 0.25)
    torch.testing.assert_close(found.moments, other.moments)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_rewards_that_are_all_equal_tell_nothing_of_powers(reward):
    found = OptimalBaseline("optimal", degree=0)
    batch = replace(random_batch(0), rewards=torch.full((12,), reward))
    for _ in range(200):
        found.learn(batch.rewards, batch.rewards, batch)
    told = found(batch.rewards.double(), batch.action_mask)[1]
    assert all(math.isfinite(each) and each < 10 for name, each in told.items() if name.startswith("power"))


@pytest.mark.parametrize("name", MAKE)
def test_without_energies_nothing_is_learnt(name):
    """Such as of rollouts that a sampler discarded, which update beliefs all the same."""
    baseline = MAKE[name]("optimal")
    batch = random_batch(0)
    before = baseline.optimal.moments.clone()
    baseline.update(replace(batch, gradient_energies=None))
    baseline.update(replace(batch, gradient_energies=0 * batch.gradient_energies))
    assert torch.equal(baseline.optimal.moments, before)
    baseline.update(batch)
    assert float(baseline.optimal.moments[0, 0, 0]) > 0


def test_a_rollout_of_the_least_or_largest_reward_keeps_a_gradient():
    """With an advantage of 0 nobody would ever learn again what its energy is."""
    baseline = build_baseline("basis_history", target="optimal", fixed_range=(0, 1))
    for step in range(300):
        batch = batch_of([0.0] * 8, gradient_energies=torch.ones((8, 2)), step=step)
        baseline.update(batch)
    found = baseline.advantages(batch)
    assert (found.values < 0).all()
    assert found.values.min() >= -0.05


@pytest.mark.parametrize("target", ["optimal", "optimal_token"])
def test_normalised_advantages_are_bounded_where_all_rollouts_are_wrong(target):
    """Their residuals are equal, so that they have no deviation."""
    baseline = build_baseline("spo", target=target, fixed_range=(0, 1))
    for step in range(3):
        batch = batch_of([0.0] * 8, gradient_energies=torch.ones((8, 2)), step=step)
        values = baseline.advantages(batch).values
        assert (values < 0).all()
        assert values.abs().max() <= math.sqrt(8) + 1e-6
        baseline.update(batch)


@pytest.mark.parametrize("groups", [[0, 1, 2, 3], [0, 0, 1, 1]])
def test_a_blend_does_not_tell_its_target_the_own_reward(groups):
    """At one rollout per prompt the blend's group mean is the own reward itself, which would predict it best."""
    baseline = build_baseline("bv_blend", clusters=CLUSTERS, confidence=0.5, target="optimal")
    for seed in range(3):
        baseline.update(random_batch(seed))
    ids = [f"p{group}" for group in groups]
    found = [baseline.advantages(batch_of([own, 1.0, 0.0, 1.0], ids, groups=groups)).baseline[0] for own in (0.0, 1.0)]
    assert float(found[0]) == float(found[1])


def test_energies_that_are_not_finite_are_left_out():
    baseline = build_baseline("basis_history", target="optimal_token")
    batch = random_batch(0)
    energies = batch.gradient_energies.clone()
    energies[3, 0] = math.inf
    energies[4, 0] = math.nan
    baseline.update(replace(batch, gradient_energies=energies))
    assert baseline.optimal.moments.isfinite().all()
    assert float(baseline.optimal.moments[0, 0, 0]) > 0
