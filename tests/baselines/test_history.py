"""BASIS with history: its equations against plain loops, what it learns, and what it must not look at."""

import math
from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import BasisHistory
from basis_rl.functional.history import shift_grid
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from benchmarks.history_mse import DRIFTS, simulate


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


def loop_values(means, rewards, shift_mean, shift_variance):
    """Posterior mean of sigmoid(m_i + s) over the grid of shifts, the own reward left out, sums written out."""
    values = []
    for i, m in enumerate(means):
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
        total = sum(w * sigmoid(m + s) for w, s in zip(weights, shift_grid().tolist(), strict=True))
        values.append(total / sum(weights))
    return values


def test_first_batch_equals_plain_loop():
    means = [math.log((k + 0.5) / (8 - k + 0.5)) for k in range(1, 7)]
    result = BasisHistory(TABLE).advantages(batch_of(REWARDS, IDS))
    expected = loop_values(means, REWARDS, 0.0, 100.0 + 0.02)
    assert result.baseline.tolist() == pytest.approx(expected, abs=1e-9)
    assert result.values.tolist() == pytest.approx(
        [0.0 if math.isnan(r) else r - v for r, v in zip(REWARDS, expected, strict=True)], abs=1e-9
    )


def test_update_is_the_kalman_step_and_ages():
    baseline = BasisHistory(TABLE, drift=0.1)
    before_mean, before_variance = baseline.mean.clone(), baseline.variance.clone()
    baseline.update(batch_of(REWARDS, IDS))
    shift = baseline.shift_mean
    for i, r in enumerate(REWARDS):
        if math.isnan(r):
            assert baseline.mean[i] == before_mean[i]
            continue
        value = sigmoid(float(before_mean[i]) + shift)
        gain = float(before_variance[i]) / (1 + float(before_variance[i]) * value * (1 - value))
        assert baseline.mean[i].item() == pytest.approx(float(before_mean[i]) + gain * (r - value))
        assert baseline.variance[i].item() == pytest.approx(gain)
    _, aged, _ = baseline._belief(IDS)
    assert aged[0].item() == pytest.approx(float(baseline.variance[0]) + 0.1)
    assert aged[2].item() == pytest.approx(float(before_variance[2]) + 0.1)


def test_rollouts_of_one_prompt_are_counted_together():
    baseline = BasisHistory()
    baseline.update(batch_of([1.0, 0.0, 1.0], ["a", "a", "b"], [0, 0, 1]))
    value = sigmoid(baseline.shift_mean)
    for prompt_id, rewards in {"a": [1.0, 0.0], "b": [1.0]}.items():
        row = baseline._row[prompt_id]
        variance = 4.0 / (1 + 4.0 * len(rewards) * value * (1 - value))
        assert float(baseline.variance[row]) == pytest.approx(variance)
        assert float(baseline.mean[row]) == pytest.approx(variance * sum(r - value for r in rewards))


def test_the_own_reward_is_excluded_exactly_even_from_the_shift():
    baseline = BasisHistory(TABLE)
    batch = batch_of([1.0, 0.0, 0.0, 1.0, 0.0, 1.0], IDS)
    before = baseline.advantages(batch).baseline
    for i in range(6):
        flipped = batch.rewards.clone()
        flipped[i] = 1 - flipped[i]
        after = baseline.advantages(replace(batch, rewards=flipped)).baseline
        assert after[i].item() == pytest.approx(before[i].item(), abs=1e-12)
        assert (after - before).abs().max() > 1e-3


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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epsilon": 0.5}, "epsilon"),
        ({"drift": -1}, "drift >= 0"),
        ({"smoothing": 0}, "smoothing > 0"),
    ],
)
def test_parameters_out_of_range(params, message):
    with pytest.raises(ValueError, match=message):
        BasisHistory(**params)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "share"), [(0.5, 0.5), (1.5, 0.8)])
def test_beats_the_group_mean_of_eight_late_in_training(d, share):
    result = simulate(DRIFTS["sqrt"], d, tilt=2.5, seed=0)
    assert result["basis_history"]["last"] <= share * result["group mean of 8"]["last"]
    assert result["basis_history"]["last"] < result["basis"]["last"]


@pytest.mark.slow
@pytest.mark.parametrize("tilt", [0.0, 2.5])
def test_costs_nothing_where_no_prompt_drifts(tilt):
    result = simulate(DRIFTS["sqrt"], 0.0, tilt=tilt, seed=0)
    for part in ("first", "last"):
        assert result["basis_history"][part] <= 1.05 * result["basis"][part]
