"""BASIS with history: its equations against plain loops, what it learns, and what it must not look at."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import BasisHistory, history
from basis_rl.functional.history import beta_update, drift_grid, expected_sigmoid, filter_update, shift_grid
from basis_rl.types import RolloutBatch, RunContext
from basis_rl.values import ValueTable


def batch_of(rewards, ids, groups=None, step=0):
    return RolloutBatch(
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups or list(range(len(ids)))),
        prompt_ids=ids,
        action_mask=torch.ones((len(ids), 1), dtype=torch.bool),
        step=step,
    )


IDS = [f"p{i}" for i in range(6)]
TABLE = ValueTable.from_rewards({p: [1.0] * (i + 1) + [0.0] * (7 - i) for i, p in enumerate(IDS)})
REWARDS = [1.0, 0.0, math.nan, 1.0, 0.0, 1.0]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def mean_of(values):
    values = list(values)
    return sum(values) / len(values)


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


def test_first_batch_equals_plain_loop():
    beliefs = {p: table_belief(k) for k, p in enumerate(IDS, start=1)}
    result = BasisHistory(TABLE).advantages(batch_of(REWARDS, IDS))
    expected = loop_values(IDS, beliefs, REWARDS, 0.0, 100.0 + 0.02)
    assert result.baseline.tolist() == pytest.approx(expected, abs=1e-9)
    assert result.values.tolist() == pytest.approx(
        [0.0 if math.isnan(r) else r - v for r, v in zip(REWARDS, expected, strict=True)], abs=1e-9
    )


@pytest.mark.parametrize("belief", ["beta", "gaussian"])
def test_other_rollouts_of_the_prompt_are_used_as_in_the_plain_loop(belief):
    ids = ["p0", "p0", "p1", "p0", "p1", "new", "new"]
    rewards = [1.0, 0.0, 1.0, math.nan, 0.25, 1.0, 1.0]
    beliefs = {"p0": table_belief(1), "p1": table_belief(2), "new": (0.0, 4.0)}
    result = BasisHistory(TABLE, belief=belief).advantages(batch_of(rewards, ids))
    expected = loop_values(ids, beliefs, rewards, 0.0, 100.0 + 0.02, belief)
    assert result.baseline.tolist() == pytest.approx(expected, abs=1e-6)


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
    assert baseline.expected(list(rewards)).tolist() == pytest.approx(mean.tolist(), rel=1e-9)


def test_a_beta_belief_does_not_depend_on_how_rollouts_are_split_into_batches():
    """Two rollouts of a prompt at once, or one after the other, where no shift moves the value in between."""
    mean, variance = torch.tensor([-1.0]).double(), torch.tensor([0.7]).double()
    value = torch.sigmoid(mean)
    at_once = beta_update(mean, variance, value, 1.0 - 2 * value, torch.tensor([2.0]).double())
    one = torch.ones(1).double()
    first, spread = beta_update(mean, variance, value, 1.0 - value, one)
    second = beta_update(first, spread, torch.sigmoid(first), -torch.sigmoid(first), one)
    assert [float(x) for x in second] == pytest.approx([float(x) for x in at_once], rel=1e-12)


def test_after_failures_alone_a_beta_is_nearer_to_the_exact_posterior():
    """V of a prompt that has failed 40 times: 0.025 exactly (prior N(0, 4)), 0.052 by the filter, 0.012 by a Beta."""
    x = torch.linspace(-30, 20, 50_001, dtype=torch.float64)
    log = -(x**2) / 8 + 40 * torch.nn.functional.logsigmoid(-x)
    exact = float((torch.softmax(log, 0) * torch.sigmoid(x)).sum())
    one = torch.ones(1, dtype=torch.float64)
    gaussian = beta = (0 * one, 4 * one)
    for _ in range(40):
        v = torch.sigmoid(gaussian[0])
        gaussian = filter_update(*gaussian, -v, v * (1 - v))
        v = torch.sigmoid(beta[0])
        beta = beta_update(*beta, v, -v, one)
    found = [float(expected_sigmoid(*gaussian)), float(torch.sigmoid(beta[0]))]
    assert [exact, *found] == pytest.approx([0.0253, 0.0520, 0.5 / 41], abs=5e-5)
    assert abs(found[1] - exact) < abs(found[0] - exact)


@pytest.mark.parametrize("belief", ["beta", "gaussian"])
def test_update_is_one_step_of_the_belief_and_ages(belief):
    baseline = BasisHistory(TABLE, drift=0.1, belief=belief)
    before_mean, before_variance = baseline.mean[0].clone(), baseline.variance[0].clone()
    baseline.update(batch_of(REWARDS, IDS))
    shift = baseline.shift_mean
    for i, r in enumerate(REWARDS):
        if math.isnan(r):
            assert baseline.mean[0, i] == before_mean[i]
            continue
        m, v, value = float(before_mean[i]), float(before_variance[i]), sigmoid(float(before_mean[i]) + shift)
        new = loop_mean((m, v), value, [r], belief)
        after = sigmoid(new + shift)  # of a Beta
        information = 1 / v + value * (1 - value)
        if belief == "beta":
            information = (1 / (v * value * (1 - value)) + 1) * after * (1 - after)
        assert baseline.mean[0, i].item() == pytest.approx(new)
        assert baseline.variance[0, i].item() == pytest.approx(1 / information)
    _, aged, _ = baseline._belief(IDS)
    assert aged[0, 0].item() == pytest.approx(float(baseline.variance[0, 0]) + 0.1)
    assert aged[0, 2].item() == pytest.approx(float(before_variance[2]) + 0.1)


@pytest.mark.parametrize("belief", ["beta", "gaussian"])
def test_rollouts_of_one_prompt_are_counted_together(belief):
    baseline = BasisHistory(belief=belief)
    baseline.update(batch_of([1.0, 0.0, 1.0], ["a", "a", "b"], [0, 0, 1]))
    value = sigmoid(baseline.shift_mean)
    for prompt_id, rewards in {"a": [1.0, 0.0], "b": [1.0]}.items():
        row, mean = baseline._row[prompt_id], loop_mean((0.0, 4.0), value, rewards, belief)
        after = sigmoid(mean + baseline.shift_mean)
        information = 1 / 4.0 + len(rewards) * value * (1 - value)
        if belief == "beta":
            information = (1 / (4.0 * value * (1 - value)) + len(rewards)) * after * (1 - after)
        assert baseline.variance[:, row].tolist() == pytest.approx([1 / information] * 6)
        assert baseline.mean[:, row].tolist() == pytest.approx([mean] * 6)


@pytest.mark.parametrize("ids", [IDS, ["p0", "p0", "p0", "p1", "p1", "p2"]])
def test_the_own_reward_is_excluded_exactly(ids):
    baseline = BasisHistory(TABLE)
    for step in range(4):
        baseline.update(batch_of([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], ids, step=step))
    batch = batch_of([1.0, 0.0, 0.0, 1.0, 0.0, 1.0], ids, step=4)
    before = baseline.advantages(batch).baseline
    for i in range(6):
        flipped = batch.rewards.clone()
        flipped[i] = 1 - flipped[i]
        after = baseline.advantages(replace(batch, rewards=flipped)).baseline
        assert after[i].item() == pytest.approx(before[i].item(), abs=1e-12)
        assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize(("moving", "low", "high"), [(False, 0.0, 0.002), (True, 0.02, 0.11)])
def test_the_drift_is_found(moving, low, high):
    torch.manual_seed(0)
    baseline = BasisHistory()
    logits = 1.5 * torch.randn(200, dtype=torch.float64)
    ids = [str(i) for i in range(200)]
    for step in range(60):
        baseline.update(batch_of(torch.bernoulli(torch.sigmoid(logits)).tolist(), ids, step=step))
        logits = logits + moving * 0.3 * torch.randn(200, dtype=torch.float64)
    assert low <= baseline.advantages(batch_of([0.0], ["0"])).metrics["drift"] <= high


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
    deviations = [mean_of(v**0.5 for v in row) for row in variance.tolist()]
    assert found["uncertainty"] == pytest.approx(sum(w * d for w, d in zip(weights, deviations, strict=True)))
    still = BasisHistory(TABLE).advantages(batch_of([0.0] * 6, IDS)).metrics
    assert still["shift"] < 0.2
    assert still["beta"] == 5.0


@pytest.mark.parametrize("belief", ["gaussian", "beta"])
def test_a_lower_confidence_bound_is_so_many_standard_deviations_below(belief):
    scale = 5.0
    table = ValueTable.from_rewards({p: [scale * r - 2 for r in TABLE.rewards(p)] for p in IDS})
    plain, bound = (BasisHistory(table, belief=belief, lcb=k) for k in (0.0, 0.7))
    for step in range(3):
        learnt = batch_of([scale * r - 2 for r in REWARDS], IDS, step=step)
        plain.update(learnt)
        bound.update(learnt)
    batch = batch_of([scale * r - 2 for r in [*REWARDS, 1.0]], [*IDS, "new"], step=3)
    value, lower = plain.advantages(batch), bound.advantages(batch)
    deviation = plain.believed(batch.prompt_ids)[1].sqrt()
    expected = [max(-2.0, v - 0.7 * d) for v, d in zip(value.baseline.tolist(), deviation.tolist(), strict=True)]
    assert lower.baseline.tolist() == pytest.approx(expected)
    assert min(expected) > -2.0
    expected = torch.nan_to_num(batch.rewards.double() - lower.baseline)
    torch.testing.assert_close(lower.values, expected)


def test_a_lower_confidence_bound_begins_without_a_baseline_and_ends_at_the_value():
    plain, bound = BasisHistory(drift=0.0), BasisHistory(drift=0.0, lcb=1.0)
    gaps = []
    for step in range(60):
        batch = batch_of([1.0, 0.0] * 3, IDS, step=step)
        value, lower = (each.advantages(batch).baseline for each in (plain, bound))
        gaps.append(float((value - lower).mean()))
        if step == 0:
            assert float(lower.max()) < 0.15  # next to nothing is known
        plain.update(batch)
        bound.update(batch)
    assert gaps[-1] < 0.25 * gaps[0]
    assert all(after <= before + 0.02 for before, after in itertools.pairwise(gaps))


def test_a_state_of_another_drift_does_not_load():
    with pytest.raises(ValueError, match="candidates of the drift"):
        BasisHistory(drift=0.003).load_state_dict(BasisHistory().state_dict())


def test_new_prompts_do_not_copy_what_is_known():
    """The table has room for more; what it holds, and what is saved, does not depend on that."""
    grown, places, states = BasisHistory(), set(), []
    for step in range(60):
        batch = batch_of([1.0, 0.0, 1.0], [f"p{2 * step + k}" for k in range(3)], step=step)
        again = BasisHistory()
        again.load_state_dict(grown.state_dict())
        for each in (grown, again):
            each.update(batch)
        places.add(grown._table.data_ptr())
        states.append(grown.state_dict())
        for key, value in again.state_dict().items():
            assert torch.equal(value, states[-1][key]) if torch.is_tensor(value) else value == states[-1][key]
    assert len(places) < 20
    assert states[0]["prompt_ids"] == ["p0", "p1", "p2"]
    for name, shape in (("mean", (6, 121)), ("variance", (6, 121)), ("last_seen", (121,))):
        assert states[-1][name].shape == shape
        assert states[-1][name].untyped_storage().nbytes() == 8 * states[-1][name].numel()


def test_what_was_saved_of_one_prompt_does_not_change_with_it():
    baseline = BasisHistory()
    baseline.update(batch_of([1.0], ["a"]))
    state = baseline.state_dict()
    kept = {name: state[name].clone() for name in ("mean", "variance", "last_seen")}
    baseline.update(batch_of([0.0], ["a"], step=1))
    assert all(torch.equal(state[name], value) for name, value in kept.items())


def test_without_a_table_it_learns_the_prompts():
    baseline = BasisHistory()
    for step in range(30):
        baseline.update(batch_of([1.0, 0.0, 1.0, 0.0], ["easy", "hard", "easy2", "hard2"], step=step))
    values = baseline.advantages(batch_of([0.0, 0.0, 0.0, 0.0], ["easy", "hard", "new", "easy2"])).baseline
    assert values[0] > 0.8
    assert values[1] < 0.2
    assert values[1] < values[2] < values[0]


def test_rewards_in_another_unit():
    table = ValueTable.from_rewards({p: [5 * r - 2 for r in TABLE.rewards(p)] for p in IDS})
    plain = BasisHistory(TABLE).advantages(batch_of(REWARDS, IDS)).baseline
    scaled = BasisHistory(table).advantages(batch_of([5 * r - 2 for r in REWARDS], IDS)).baseline
    torch.testing.assert_close(scaled, 5 * plain - 2)


TEXTS = {**{f"easy{i}": f"Add the numbers {i} and 2" for i in range(40)},
         **{f"hard{i}": f"Prove the lemma number {i}" for i in range(40)}}  # fmt: skip


def texted(rewards, ids, step=0):
    return replace(batch_of(rewards, ids, step=step), prompt_texts=[TEXTS[name] for name in ids])


def taught():
    """A belief that has seen half of the prompts once: easy ones right, hard ones wrong."""
    baseline = BasisHistory(prior="text")
    for step in range(10):
        ids = [f"{kind}{2 * step + k}" for kind in ("easy", "hard") for k in range(2)]
        baseline.update(texted([float(name.startswith("easy")) for name in ids], ids, step))
    return baseline


def test_a_prompt_that_was_never_sampled_is_told_by_its_text():
    baseline, flat = taught(), BasisHistory()
    new = ["easy30", "hard30"]
    batch = texted([1.0, 0.0], new)
    told = baseline.advantages(batch).baseline
    assert told[0] > 0.75
    assert told[1] < 0.25
    assert "prompt_texts" in baseline.requires
    assert not flat.requires
    mean, variance = baseline.believed(new)
    assert mean[0] > 0.75 > 0.25 > mean[1]
    assert variance[0] < BasisHistory(prior="text").believed(new)[1][0]
    assert baseline.believed(["nobody"])[0] == pytest.approx(0.5, abs=0.2)


def test_the_texts_of_a_run_are_known_before_their_first_batch():
    baseline = BasisHistory(prior="text")
    baseline.validate(RunContext(prompts=dict.fromkeys(TEXTS, "x"), provenance={}, texts=TEXTS))
    for step in range(10):
        ids = [f"{kind}{2 * step + k}" for kind in ("easy", "hard") for k in range(2)]
        baseline.update(batch_of([float(name.startswith("easy")) for name in ids], ids, step=step))
    same = taught()
    same.text_prior.know(TEXTS)
    assert torch.equal(baseline.believed(["easy30", "hard3"])[0], same.believed(["easy30", "hard3"])[0])


def test_a_prior_from_the_text_starts_as_wide_as_the_flat_one_and_comes_back():
    baseline = BasisHistory(prior="text")
    baseline.text_prior.know(TEXTS)
    mean, variance = baseline.text_prior(["easy1", "hard1"])
    assert mean.tolist() == [0, 0]
    assert variance.tolist() == pytest.approx([4.0, 4.0], rel=1e-2)
    first, again = taught(), BasisHistory(prior="text")
    again.load_state_dict(first.state_dict())
    batch = texted([1.0, 0.0, 1.0], ["easy30", "hard31", "easy1"])
    assert torch.equal(first.advantages(batch).values, again.advantages(batch).values)
    with pytest.raises(ValueError, match="saved with a prior from the text"):
        BasisHistory().load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="saved without a prior"):
        BasisHistory(prior="text").load_state_dict(BasisHistory().state_dict())
