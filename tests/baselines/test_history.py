"""BASIS with history: its equations against plain loops, what it learns, and what it must not look at."""

import math
import random
from statistics import fmean

import pytest
import torch

from basis_rl.baselines import BasisHistory
from basis_rl.baselines.history import TextPrior
from basis_rl.functional import history
from basis_rl.functional.history import drift_grid, expected_sigmoid, shift_grid
from basis_rl.types import RunContext
from basis_rl.values import ValueTable
from tests.support.batches import batch_of

IDS = [f"p{i}" for i in range(6)]
TABLE = ValueTable.from_rewards({p: [1.0] * (i + 1) + [0.0] * (7 - i) for i, p in enumerate(IDS)})
REWARDS = [1.0, 0.0, math.nan, 1.0, 0.0, 1.0]


def expected(baseline, prompt_ids):
    """Value of each prompt before the batch, the shift taken at its mean; on the scale from 0 to 1."""
    mean, variance, _ = baseline._belief(prompt_ids)
    own = torch.zeros_like(variance) if baseline.belief == "beta" else variance
    return baseline.log_weights.exp() @ expected_sigmoid(mean + baseline.shift_mean, own)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def loop_shift(i, means, rewards, shift_mean, shift_variance):
    """Posterior mean and variance of the shift on its grid, the reward of row i left out, sums written out."""
    weights = []
    for s in shift_grid().tolist():
        log = -0.5 * (s - shift_mean) ** 2 / shift_variance
        for j, r in enumerate(rewards):
            if j != i and not math.isnan(r):
                v = sigmoid(means[j] + s)
                log += r * math.log(v) + (1 - r) * math.log(1 - v)
        weights.append(log)
    top = max(weights)
    weights = [math.exp(w - top) for w in weights]
    total = sum(weights)
    mean = sum(w * s for w, s in zip(weights, shift_grid().tolist(), strict=True)) / total
    return mean, sum(w * (s - mean) ** 2 for w, s in zip(weights, shift_grid().tolist(), strict=True)) / total


def logit(p):
    return math.log(p / (1 - p))


def loop_mean(belief, told, others, form):
    """The mean of a belief that has learnt from the `others` of its prompt, of which `told` was expected."""
    m, v = belief
    if form == "gaussian":
        return m + v / (1 + v * len(others) * told * (1 - told)) * sum(r - told for r in others)
    behind = 1 / (v * told * (1 - told))
    return m + logit(told + sum(r - told for r in others) / (behind + len(others))) - logit(told)


def loop_update(belief, shift, rewards, form):
    """Mean and variance of a belief that has learnt from `rewards`, at a known shift."""
    m, v = belief
    told = sigmoid(m + shift)
    mean = loop_mean(belief, told, rewards, form)
    if form == "gaussian":
        return mean, 1 / (1 / v + len(rewards) * told * (1 - told))
    after = sigmoid(mean + shift)
    return mean, 1 / ((1 / (v * told * (1 - told)) + len(rewards)) * after * (1 - after))


def loop_values(ids, beliefs, rewards, shift_mean, shift_variance, form="beta"):
    """V_i of one filter: the belief, with the other rewards of the prompt, moved by the others' shift."""
    values = []
    means = [beliefs[p][0] for p in ids]
    for i, prompt in enumerate(ids):
        s, u = loop_shift(i, means, rewards, shift_mean, shift_variance)
        m, v = beliefs[prompt]
        scale = math.sqrt(1 + math.pi * u / 8)
        told = sigmoid((m + s) / scale)
        others = [r for j, r in enumerate(rewards) if j != i and ids[j] == prompt and not math.isnan(r)]
        values.append(sigmoid((loop_mean((m, v), told, others, form) + s) / scale))
    return values


def table_belief(k, n=8):
    p = (k + 0.5) / (n + 1)
    return math.log(p / (1 - p)), 1 / ((n + 1) * p * (1 - p))


@pytest.mark.parametrize("belief", ["beta", "gaussian"])
@pytest.mark.parametrize(
    ("ids", "rewards"),
    [(IDS, REWARDS), (["p0", "p0", "p1", "p0", "p1", "new", "new"], [1.0, 0.0, 1.0, math.nan, 0.25, 1.0, 1.0])],
)
def test_first_batch_equals_plain_loop(ids, rewards, belief):
    beliefs = {p: table_belief(k) for k, p in enumerate(IDS, start=1)} | {"new": (0.0, 4.0)}
    result = BasisHistory(TABLE, belief=belief).advantages(batch_of(rewards, ids))
    expected = loop_values(ids, beliefs, rewards, 0.0, 100.0 + 0.02, belief)
    assert result.baseline.tolist() == pytest.approx(expected, abs=1e-6)
    left = [0.0 if math.isnan(r) else r - v for r, v in zip(rewards, expected, strict=True)]
    assert result.values.tolist() == pytest.approx(left, abs=1e-6)


def test_drifts_are_weighed_by_how_well_they_predicted():
    baseline = BasisHistory(TABLE)
    rewards = [1.0, 0.0, 0.25, 1.0, 0.0, 1.0]
    for step in range(3):
        baseline.update(batch_of(rewards, IDS, step=step))
    before = baseline.log_weights.tolist()
    drifts = drift_grid().tolist()
    shift = baseline.shift_mean, baseline.shift_variance + 0.02
    pooled = [sum(math.exp(w) * m for w, m in zip(before, baseline.mean[:, i].tolist(), strict=True)) for i in range(6)]
    values = []
    for d in range(len(drifts)):
        row = []
        for i in range(6):
            s, u = loop_shift(i, pooled, rewards, *shift)
            row.append(sigmoid((float(baseline.mean[d, i]) + s) / math.sqrt(1 + math.pi * u / 8)))
        values.append(row)
    expected = [sum(math.exp(before[d]) * values[d][i] for d in range(len(drifts))) for i in range(6)]
    result = baseline.advantages(batch_of(rewards, IDS, step=3))
    assert result.baseline.tolist() == pytest.approx(expected, abs=1e-9)
    assert result.metrics["drift"] == pytest.approx(
        sum(math.exp(w) * d for w, d in zip(before, drifts, strict=True)), abs=1e-12
    )
    baseline.update(batch_of(rewards, IDS, step=3))
    after = [
        0.97 * w + sum(r * math.log(v) + (1 - r) * math.log(1 - v) for r, v in zip(rewards, row, strict=True))
        for w, row in zip(before, values, strict=True)
    ]
    total = math.log(sum(math.exp(w) for w in after))
    assert baseline.log_weights.tolist() == pytest.approx([w - total for w in after], abs=1e-9)


def test_a_beta_belief_counts_as_a_beta_does_where_nothing_is_shared(monkeypatch):
    """Without a common shift: Beta(1/2, 1/2), and one more on its side for each rollout, however many there are."""
    monkeypatch.setattr(history, "shift_grid", lambda: torch.tensor([0.0], dtype=torch.float64))
    baseline = BasisHistory(drift=0.0)
    rewards = {"never": [0.0] * 40, "mixed": [1.0, 0.0, 0.0, 1.0, 0.25], "always": [1.0] * 20}
    for step in range(40):
        ids = [name for name, own in rewards.items() if step < len(own)]
        baseline.update(batch_of([rewards[name][step] for name in ids], ids, step=step))
    baseline.shift_variance = baseline.shift_drift = 0.0
    mean, variance = baseline.believed(list(rewards))
    for i, own in enumerate(rewards.values()):
        a, n = 0.5 + sum(own), 1.0 + len(own)
        assert mean[i].item() == pytest.approx(a / n, rel=1e-6)
        assert variance[i].item() == pytest.approx(a / n * (1 - a / n) / (n + 1), rel=1e-6)
    assert expected(baseline, list(rewards)).tolist() == pytest.approx(mean.tolist(), rel=1e-9)


@pytest.mark.parametrize("belief", ["beta", "gaussian"])
def test_update_is_one_step_of_the_belief(belief):
    """Rollouts of one prompt are counted together; a prompt without a reward keeps its belief."""
    baseline = BasisHistory(TABLE, belief=belief)
    before = {p: (float(baseline.mean[0, i]), float(baseline.variance[0, i])) for i, p in enumerate(IDS)}
    baseline.update(batch_of([*REWARDS, 1.0, 1.0, 0.0], [*IDS, "p1", "new", "new"]))
    learnt = {p: [r] for p, r in zip(IDS, REWARDS, strict=True)} | {"p1": [0.0, 1.0], "new": [1.0, 0.0]}
    for prompt, rewards in learnt.items():
        expected = before.get(prompt, (0.0, 4.0))
        if not math.isnan(rewards[0]):
            expected = loop_update(expected, baseline.shift_mean, rewards, belief)
        row = baseline._row[prompt]
        assert baseline.mean[:, row].tolist() == pytest.approx([expected[0]] * 6)
        assert baseline.variance[:, row].tolist() == pytest.approx([expected[1]] * 6)


def test_a_shift_that_stands_still_is_known_no_better_than_the_grid_is_fine():
    """So many rollouts tell it exactly, but it must be learnt further."""
    generator = torch.Generator().manual_seed(0)
    baseline = BasisHistory(shift_drift=0.0, target="value", fixed_range=(0, 1))
    ids = [f"p{i}" for i in range(512)]
    right = torch.rand(512, generator=generator)
    for step in range(60):
        batch = batch_of((torch.rand(512, generator=generator) < right).float(), ids, step=step)
        baseline.update(batch)
    found = baseline.advantages(batch)
    assert found.baseline.isfinite().all()
    assert 0 < float(found.values.square().mean()) < 0.2


def test_a_batch_without_rewards_says_nothing_about_the_drift():
    baseline = BasisHistory(TABLE)
    for step in range(3):
        baseline.update(batch_of([1.0] * 6, IDS, step=step))
    before, spread = baseline.log_weights.clone(), baseline.shift_variance
    baseline.update(batch_of([math.nan] * 6, IDS, step=3))
    assert torch.equal(before, baseline.log_weights)
    assert baseline.shift_variance == pytest.approx(spread + 0.02), "but the shift has drifted for a step"
    assert baseline.step == 4


def test_a_belief_ages_from_the_batch_that_saw_it_last():
    baseline = BasisHistory(drift=0.1, prior_variance=2.0)
    baseline.update(batch_of([1.0, 0.0], ["a", "b"]))
    for step in (1, 2):
        baseline.update(batch_of([1.0], ["a"], step=step))
    _, variance, known = baseline._belief(["a", "b", "new"])
    seen = baseline.variance[0]
    assert variance[0].tolist() == pytest.approx([float(seen[0]) + 0.1, float(seen[1]) + 0.3, 2.0])
    assert known.tolist() == [True, True, False]


def test_what_is_reported():
    baseline = BasisHistory(TABLE)
    for step in range(6):
        baseline.update(batch_of([1.0] * 6, IDS, step=step))
    batch = batch_of([1.0] * 7, [*IDS, "new"], step=6)
    found = baseline.advantages(batch).metrics
    assert found["shift"] > 1.0, "everything is solved"
    assert found["beta"] == pytest.approx(1 / found["shift"])
    assert found["known"] == pytest.approx(6 / 7)
    _, variance, _ = baseline._belief(batch.prompt_ids)
    weights = baseline.log_weights.exp().tolist()
    deviations = [fmean(v**0.5 for v in row) for row in variance.tolist()]
    assert found["uncertainty"] == pytest.approx(sum(w * d for w, d in zip(weights, deviations, strict=True)))
    still = BasisHistory(TABLE).advantages(batch_of([0.0] * 6, IDS)).metrics
    assert still["shift"] < 0.2
    assert still["beta"] == 5.0


@pytest.mark.parametrize("belief", ["gaussian", "beta"])
def test_a_lower_confidence_bound_is_so_many_standard_deviations_below(belief):
    table = ValueTable.from_rewards({p: [5 * r - 2 for r in TABLE.rewards(p)] for p in IDS})
    plain, bound = (BasisHistory(table, belief=belief, lcb=k) for k in (0.0, 0.7))
    for step in range(3):
        for each in (plain, bound):
            each.update(batch_of([5 * r - 2 for r in REWARDS], IDS, step=step))
    batch = batch_of([5 * r - 2 for r in [*REWARDS, 1.0]], [*IDS, "new"], step=3)
    value, lower = plain.advantages(batch), bound.advantages(batch)
    deviation = plain.believed(batch.prompt_ids)[1].sqrt()
    expected = [max(-2.0, v - 0.7 * d) for v, d in zip(value.baseline.tolist(), deviation.tolist(), strict=True)]
    assert lower.baseline.tolist() == pytest.approx(expected)
    assert min(expected) > -2.0
    torch.testing.assert_close(lower.values, torch.nan_to_num(batch.rewards.double() - lower.baseline))


def test_new_prompts_do_not_copy_what_is_known():
    """The table has room for more; what is saved does not depend on that."""
    baseline, places = BasisHistory(), set()
    for step in range(60):
        baseline.update(batch_of([1.0, 0.0, 1.0], [f"p{2 * step + k}" for k in range(3)], step=step))
        places.add(baseline._table.data_ptr())
    assert len(places) < 20
    state = baseline.state_dict()
    assert state["prompt_ids"] == [f"p{k}" for k in range(121)]
    assert state["table"].shape == (121, 2 * 6 + 1)
    assert state["table"].untyped_storage().nbytes() == 8 * state["table"].numel()


TEXTS = {**{f"easy{i}": f"Add the numbers {i} and 2" for i in range(40)},
         **{f"hard{i}": f"Prove the lemma number {i}" for i in range(40)}}  # fmt: skip


def texted(rewards, ids, step=0):
    return batch_of(rewards, ids, step=step, prompt_texts=[TEXTS[name] for name in ids])


def taught(known):
    """A belief that has seen half of the prompts once: easy ones right, hard ones wrong.

    It is told the texts with each batch, or all of them before the first one.
    """
    baseline = BasisHistory(prior="text")
    if known is not None:
        baseline.validate(RunContext(prompts=dict.fromkeys(known, "x"), provenance={}, texts=known))
    for step in range(10):
        ids = [f"{kind}{2 * step + k}" for kind in ("easy", "hard") for k in range(2)]
        told = batch_of if known is not None else texted
        baseline.update(told([float(name.startswith("easy")) for name in ids], ids, step=step))
    return baseline


@pytest.mark.parametrize("known", [None, TEXTS])
def test_a_prompt_that_was_never_sampled_is_told_by_its_text(known):
    baseline, new = taught(known), ["easy30", "hard30"]
    told = baseline.advantages(texted([1.0, 0.0], new)).baseline
    assert told[0] > 0.75 > 0.25 > told[1]
    assert "prompt_texts" in baseline.requires
    assert not BasisHistory().requires
    if known is None:
        # Advantages have left nothing behind.
        assert torch.equal(baseline.believed(new)[0], baseline.believed(["nobody", "no one"])[0])
        baseline.validate(RunContext(prompts=dict.fromkeys(TEXTS, "x"), provenance={}, texts=TEXTS))
    mean, variance = baseline.believed(new)
    assert mean[0] > 0.75 > 0.25 > mean[1]
    assert variance[0] < BasisHistory(prior="text").believed(new)[1][0]
    assert baseline.believed(["nobody"])[0] == pytest.approx(0.5, abs=0.2)


def test_a_prior_from_the_text_with_all_weight_on_a_share_of_0_is_flat():
    """At each step of a run in which the range of rewards widens: what texts tell the other filters leaves no trace."""
    flat, text = BasisHistory(prior="flat"), BasisHistory(prior="text")
    text.log_weights = torch.where(text.shares == 0, flat.log_weights[0], -torch.inf)
    chance = random.Random(0)
    for step in range(12):
        ids = chance.sample([*TEXTS], 8)
        rewards = [float(chance.random() < (0.8 if name.startswith("easy") else 0.2)) for name in ids]
        batch = texted([2 * r - (step > 6) for r in rewards], ids, step=step)
        expected_values = flat.advantages(batch).values
        torch.testing.assert_close(text.advantages(batch).values, expected_values, atol=1e-9, rtol=0)
        flat.update(batch)
        text.update(batch)


@pytest.mark.parametrize("telling", [True, False])
def test_whether_texts_tell_anything_is_learnt(telling):
    """Each prompt solves always or never, by its kind or by chance, and texts name the kind."""
    baseline, chance = BasisHistory(prior="text"), random.Random(0)
    solved = {name: name.startswith("easy") if telling else chance.random() < 0.5 for name in TEXTS}
    names = chance.sample([*TEXTS], len(TEXTS))
    for step in range(20):
        ids = (names + names)[8 * step : 8 * step + 8]
        baseline.update(texted([float(solved[name]) for name in ids], ids, step=step))
    found = baseline.advantages(texted([1.0, 0.0], names[:2])).metrics["told_by_texts"]
    assert found > 0.6 if telling else found < 0.1


def test_a_prior_from_the_text_does_not_depend_on_the_default_type():
    plain = taught(TEXTS).believed(["easy30", "nobody"])[0]
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(taught(TEXTS).believed(["easy30", "nobody"])[0], plain, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_prompt_that_was_sampled_goes_on_learning_from_its_text():
    """Of two that failed once at the start, one has a text that others solve since, and one whose like still fail."""
    baseline = BasisHistory(prior="text")
    baseline.update(texted([0.0, 0.0], ["easy0", "hard0"]))
    first = baseline.believed(["easy0", "hard0"])[0]
    for step in range(1, 10):
        ids = [f"{kind}{2 * step + k}" for kind in ("easy", "hard") for k in range(2)]
        baseline.update(texted([float(name.startswith("easy")) for name in ids], ids, step=step))
    later, new = baseline.believed(["easy0", "hard0"])[0], baseline.believed(["easy1", "hard1"], TEXTS)[0]
    assert later[0] > first[0] + 0.2
    assert later[1] < first[1] / 2
    # Their own rewards still count.
    assert later[0] < new[0]
    assert later[1] < new[1]
    # What the text had told before the first visit counts once.
    baseline.update(texted([0.0], ["hard1"], step=10))
    assert new[1] / 2 < baseline.believed(["hard1"])[0] < new[1]


@pytest.mark.parametrize("belief", ["beta", "gaussian"])
def test_a_reward_is_not_counted_by_the_text_and_by_the_prompt(belief):
    """Of one prompt, both together learn about as much as the belief without texts."""
    values = []
    for prior in ("flat", "text"):
        baseline = BasisHistory(prior=prior, belief=belief)
        baseline.range.declare((0.0, 1.0))
        baseline.shift_variance, baseline.shift_drift = 1e-9, 1e-9
        for step in range(3):
            baseline.update(texted([0.0], ["hard1"], step=step))
            values.append(float(expected(baseline, ["hard1"])))
    # Counted twice, it would be half.
    assert values[3:] == pytest.approx(values[:3], rel=0.35)


def test_rollouts_of_one_visit_count_as_many():
    """As so many visits of one rollout, in any order; and they take one place of what is remembered."""
    visit, visits = TextPrior(4.0), TextPrior(4.0)
    for each in (visit, visits):
        each.know(TEXTS)
    one, names = torch.ones(1, dtype=torch.float64), ["hard1"]
    visit.update(names, one / 4, 4 * one, 0.3)
    for reward in (0.0, 1.0, 0.0, 0.0):
        visits.update(names, reward * one, one, 0.3)
    torch.testing.assert_close(visit(names)[0], visits(names)[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(visit(names)[1], visits(names)[1], atol=1e-3, rtol=0)
    assert len(visit.visits) == 1
    baseline = BasisHistory(prior="text")
    baseline.update(texted([0.0, 1.0, 0.0, 0.0, math.nan, 1.0], [*names * 5, "easy1"]))
    assert baseline.text_prior.visits[:, :2].tolist() == [[0.25, 4.0], [1.0, 1.0]]


def test_a_text_s_rewards_are_forgotten_after_4096_visits():
    prior, alone = TextPrior(4.0), TextPrior(4.0)
    for each in (prior, alone):
        each.know(TEXTS)
    ones = torch.ones(64, dtype=torch.float64)
    prior.update(["hard1"] * 64, 0 * ones, ones, 0.0)
    assert (prior(["hard1"])[0][1:] < -1).all()
    for _ in range(64):
        for each in (prior, alone):
            each.update(["easy1"] * 64, ones, ones, 0.0)
    torch.testing.assert_close(prior(["hard1"])[0], alone(["hard1"])[0], atol=1e-2, rtol=0)
    assert len(prior.visits) == len(prior.seen) == 4096


@pytest.mark.parametrize("ends", [(-1.0, 1.0), (-3.0, 1.0), (0.0, 2.0)])
def test_a_wider_reward_range_leaves_values_that_texts_have_told(ends):
    """In reward units, of a policy that has improved: of prompts that were sampled exactly, of others about."""
    baseline, chance = BasisHistory(prior="text"), random.Random(0)
    baseline.range.declare((0.0, 1.0))
    for step in range(40):
        ids = [f"{kind}{chance.randrange(30)}" for kind in ("easy", "hard") for _ in range(16)]
        logits = [(2.0 if name.startswith("easy") else -2.0) + step / 10 - 2 for name in ids]
        rewards = [float(chance.random() < 1 / (1 + math.exp(-x))) for x in logits]
        baseline.update(texted(rewards, ids, step=step))
    baseline.text_prior.know(TEXTS)
    names = ["easy0", "hard0", "easy31", "hard31"]
    before = baseline.range.unscaled(expected(baseline, names))
    baseline._rescale(*baseline.range.widen(torch.tensor(ends)))
    after = baseline.range.unscaled(expected(baseline, names))
    torch.testing.assert_close(after[:2], before[:2], atol=1e-6, rtol=0)
    torch.testing.assert_close(after[2:], before[2:], atol=0.05, rtol=0)


def test_texts_that_came_with_batches_are_resumed():
    """Of a data set that is streamed: the loaded object knows what the saved one does before it meets the prompts."""
    first, again, third = taught(None), BasisHistory(prior="text"), BasisHistory(prior="text")
    again.load_state_dict(first.state_dict())
    third.load_state_dict(again.state_dict())
    seen = ["easy0", "hard0", "easy19", "hard19"]
    for each in (again, third):
        assert torch.equal(each.believed(seen)[0], first.believed(seen)[0])
        each._rescale(*each.range.widen(torch.tensor([-1.0, 1.0])))
    first._rescale(*first.range.widen(torch.tensor([-1.0, 1.0])))
    assert torch.equal(third.believed(seen)[0], first.believed(seen)[0])
    assert not taught(TEXTS).state_dict()["text_prior"]["met"]


def test_a_prior_from_the_text_starts_as_wide_as_the_flat_one_and_is_resumed_with_its_own_settings():
    baseline = BasisHistory(prior="text")
    baseline.text_prior.know(TEXTS)
    mean, variance = baseline.text_prior(["easy1", "hard1"])
    assert not mean.any()
    assert variance.T.tolist() == [pytest.approx([0.0, 2.0, 3.0], rel=1e-2)] * 2
    assert baseline._belief(["easy1"])[1].flatten().tolist() == pytest.approx([4.0] * 3 * 6, rel=1e-2)
    with pytest.raises(ValueError, match="another `prior`"):
        BasisHistory().load_state_dict(baseline.state_dict())
    with pytest.raises(ValueError, match="another `drift`"):
        BasisHistory(drift=0.003).load_state_dict(BasisHistory().state_dict())
