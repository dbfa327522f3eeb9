"""The value study's analysis against plain loops."""

import numpy as np
import pytest

from basis_rl.baselines import BatchMean, DrGrpo, Rloo
from basis_rl.functional.diagnostics import advantage_metrics
from studies.value import analysis as va

RNG = np.random.default_rng(0)
TRUTH = RNG.uniform(size=40)
SAMPLES = (RNG.uniform(size=(40, 24)) < TRUTH[:, None]).astype(np.uint8)
IDS = [f"p{i}" for i in range(40)]


def test_rewards_of_a_batch_are_samples_of_its_prompts_each_used_once():
    marked = np.arange(40 * 24).reshape(40, 24)
    rows = va.draw_batch(np.random.default_rng(1), 40, 12)
    drawn = va.draw_rewards(np.random.default_rng(1), marked, rows, 8)
    assert len(set(rows.tolist())) == 12
    for row, rewards in zip(rows, drawn, strict=True):
        assert set(rewards.tolist()) <= set(marked[row].tolist())
        assert len(set(rewards.tolist())) == 8


def loop_baselines(name, rewards, g):
    """``b[i][k]`` of B prompts with the first g rewards each."""
    flat = [r[k] for r in rewards for k in range(g)]
    if name == "batch mean":
        return [[sum(flat) / len(flat)] * g for _ in rewards]
    if name == "group mean":
        return [[sum(r[:g]) / g] * g for r in rewards]
    return [[sum(r[j] for j in range(g) if j != k) / (g - 1) for k in range(g)] for r in rewards]


@pytest.mark.parametrize(
    ("name", "baseline", "g"),
    [("batch mean", BatchMean(), 1), ("group mean", DrGrpo(), 1), ("group mean", DrGrpo(), 4), ("rloo", Rloo(), 2),
     ("rloo", Rloo(), 8)],
)  # fmt: skip
def test_errors_are_those_of_a_plain_loop(name, baseline, g):
    rewards, truth, ids = SAMPLES[:10, :8], TRUTH[:10], IDS[:10]
    found = va.estimate(va.Estimator(name, baseline, g), ids, rewards)
    wanted = loop_baselines(name, rewards.tolist(), g)
    assert found == pytest.approx(np.array(wanted))
    errors = [sum((b - v) ** 2 for b in row) / g for row, v in zip(wanted, truth, strict=True)]
    assert va.squared_errors(found, truth).tolist() == pytest.approx(errors)
    seen = np.ascontiguousarray(rewards[:, :g])
    batch = va.rollout_batch(ids, seen)
    logged = advantage_metrics(batch, baseline.advantages(batch))["baseline/explained_variance"]
    assert va.explained_variance(found, seen) == pytest.approx(logged)


def test_a_measurement_is_the_mean_over_its_batches():
    rows = [va.Estimator("batch mean", BatchMean(), 1), va.Estimator("rloo 4", Rloo(), 4)]
    found = va.measure(rows, IDS, TRUTH, SAMPLES, size=16, batches=3, seed=5)
    rng, errors = np.random.default_rng(5), []
    for _ in range(3):
        picked = va.draw_batch(rng, 40, 16)
        mean = va.draw_rewards(rng, SAMPLES, picked, 4)[:, 0].mean()
        errors.append(sum((mean - TRUTH[i]) ** 2 for i in picked) / 16)
    assert found["batch mean"]["mse"] == pytest.approx(np.mean(errors))
    assert found["batch mean"]["error"] == pytest.approx(np.std(errors, ddof=1) / 3**0.5)
    assert found["batch mean"]["explained"] == pytest.approx(0)


@pytest.mark.parametrize("moved", [0.0, 1.5])
def test_drift_finds_a_common_shift_and_what_is_beside_it(moved):
    rng = np.random.default_rng(2)
    logits, own = rng.normal(0, 1, 4000), rng.normal(0, 0.8, 4000)
    before, now = (
        rng.uniform(size=(4000, 200)) < 1 / (1 + np.exp(-z))[:, None] for z in (logits, logits + moved + own)
    )
    found = va.drift(before, now)
    assert found["shift"] == pytest.approx(moved, abs=0.05)
    assert found["spread"] == pytest.approx(0.8, abs=0.05)
