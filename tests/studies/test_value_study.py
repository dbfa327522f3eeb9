"""The value study's analysis against plain loops."""

import math
from dataclasses import replace

import numpy as np
import pytest

from basis_rl.baselines import BatchMean, BVBlend, DrGrpo, Rloo
from basis_rl.functional.diagnostics import advantage_metrics
from studies.small_policy import family
from studies.value import analysis as va
from studies.value import report as value_report
from studies.value import study as value_study

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


def test_batches_without_variance_are_left_out_of_the_mean_explained_variance():
    same, mixed = np.ones((4, 1)), np.array([[1.0], [0.0], [1.0], [0.0]])
    found = [va.explained_variance(np.full((4, 1), 0.5), rewards) for rewards in (same, mixed, mixed)]
    assert math.isnan(found[0])
    assert va.mean_of_known([*found, 1.0]) == pytest.approx(1 / 3)
    assert math.isnan(va.mean_of_known(found[:1]))


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


def test_shares_are_of_the_batch_mean_of_the_same_stage_and_seed():
    errors = {("early", 0): 0.1, ("early", 1): 0.2, ("middle", 0): 0.4, ("late", 0): 0.5}
    rows = [
        {"seed": seed, "stage": stage, "estimator": name, "mse": factor * error}
        for (stage, seed), error in errors.items()
        for name, factor in (("basis unb", 0.5), ("batch mean", 1.0))
    ]
    found = value_report.shares(rows)
    assert found["early"] == {"basis unb": [0.5, 0.5], "batch mean": [1.0, 1.0]}
    assert found["late"]["basis unb"] == [0.5]


def test_replayed_history_is_that_of_the_batches_in_their_order():
    baseline = va.replay(BVBlend(dict.fromkeys(IDS, 3)), [(IDS[:4], SAMPLES[:4, :8]), (IDS[4:8], SAMPLES[4:8, :8])])
    first, second = SAMPLES[:4, :8].mean(), SAMPLES[4:8, :8].mean()
    assert baseline.history[3][0] == pytest.approx(0.1 * first + 0.9 * second)


def test_rollouts_are_kept_for_their_plan_and_no_other(tmp_path, monkeypatch):
    plan, names = value_study.QUICK, ("reference", *value_study.STAGES)
    made = {key: np.full((2, 3), number, dtype=np.uint8) for number, key in enumerate(names)}
    history = [(["a", "b"], np.array([[1, 0], [0, 0]], dtype=np.uint8))]
    makings = iter([{**made, "ids": ["a", "b"], "family": [0, 1], "history": history}])  # a second one would raise
    monkeypatch.setattr(value_study, "make_rollouts", lambda *_: next(makings))
    first, again = (value_study.kept_rollouts(plan, tmp_path) for _ in range(2))
    assert first.keys() == again.keys()
    assert [again[key] for key in ("ids", "family", "origin")] == [first[key] for key in ("ids", "family", "origin")]
    assert all(np.array_equal(again[key], made[key]) for key in names)
    assert again["history"][0][0] == history[0][0]
    assert np.array_equal(again["history"][0][1], history[0][1])
    with pytest.raises(SystemExit, match="another plan"):
        value_study.kept_rollouts(replace(plan, table=plan.table + 1), tmp_path)


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


def test_families_are_digits_and_sign():
    found = {family(f"... problem: {text} =") for text in ("3 + 4", "3 - 4", "3 + 44", "3 - 44", "33 + 4", "33 - 44")}
    assert found == {0, 1, 2, 3, 4, 7}
