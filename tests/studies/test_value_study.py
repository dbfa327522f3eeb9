"""The value study's analysis against plain loops."""

import math
from dataclasses import replace

import numpy as np
import pytest

from basis_rl.baselines import Basis, BatchMean, BVBlend, DrGrpo, Rloo
from basis_rl.functional.diagnostics import advantage_metrics
from basis_rl.values import ValueTable
from studies.small_policy import family
from studies.value import analysis as va
from studies.value import report as value_report
from studies.value import study as value_study

RNG = np.random.default_rng(0)
TRUTH = RNG.uniform(size=40)
SAMPLES = (RNG.uniform(size=(40, 24)) < TRUTH[:, None]).astype(np.uint8)
IDS = [f"p{i}" for i in range(40)]
TABLE = ValueTable.from_rewards({p: [float(r) for r in SAMPLES[i, :16]] for i, p in enumerate(IDS)})


@pytest.mark.parametrize("spread", [0.2, 0.25, 0.32])
def test_tilted_weights_have_the_spread_that_was_asked_for(spread):
    w = va.tilt_to(TRUTH, spread)
    mean = sum(a * b for a, b in zip(w, TRUTH, strict=True))
    found = math.sqrt(sum(a * (b - mean) ** 2 for a, b in zip(w, TRUTH, strict=True)))
    assert found == pytest.approx(spread, abs=1e-6)
    assert w.min() >= 0
    assert w.sum() == pytest.approx(1)


def test_rewards_of_a_batch_are_samples_of_its_prompts_each_used_once():
    marked = np.arange(40 * 24).reshape(40, 24)
    rows = va.draw_batch(np.random.default_rng(1), np.full(40, 1 / 40), 12)
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
def test_errors_and_shares_at_the_bounds_are_those_of_a_plain_loop(name, baseline, g):
    rewards, truth, ids = SAMPLES[:10, :8], TRUTH[:10], IDS[:10]
    found = va.estimate(va.Estimator(name, baseline, g), ids, rewards)
    wanted = loop_baselines(name, rewards.tolist(), g)
    assert found == pytest.approx(np.array(wanted))
    errors = [sum((b - v) ** 2 for b in row) / g for row, v in zip(wanted, truth, strict=True)]
    assert va.squared_errors(found, truth).tolist() == pytest.approx(errors)
    bounds = [sum(b in (0, 1) for b in row) / g for row in wanted]
    assert va.at_bounds(found).tolist() == pytest.approx(bounds)
    seen = np.ascontiguousarray(rewards[:, :g])
    batch = va.rollout_batch(ids, seen)
    logged = advantage_metrics(batch, baseline.advantages(batch))["baseline/explained_variance"]
    assert va.explained_variance(found, seen) == pytest.approx(logged)


def test_batches_without_variance_are_left_out_of_the_mean_explained_variance():
    same, mixed = np.ones((4, 1)), np.array([[1.0], [0.0], [1.0], [0.0]])
    found = [va.explained_variance(np.full((4, 1), 0.5), rewards) for rewards in (same, mixed, mixed)]
    assert math.isnan(found[0])
    assert value_report.mean_and_error([*found, 1.0]) == pytest.approx([1 / 3, 1 / 3])
    assert value_report.mean_and_error(found[:2]) == pytest.approx([0.0, math.nan], nan_ok=True)
    assert value_report.mean_and_error(found[:1]) == pytest.approx([math.nan, math.nan], nan_ok=True)


def test_a_measurement_is_the_mean_over_its_batches_and_bands():
    rows = [va.Estimator("batch mean", BatchMean(), 1), va.Estimator("rloo 4", Rloo(), 4)]
    found = va.measure(rows, IDS, TRUTH, SAMPLES, np.full(40, 1 / 40), size=16, repeats=3, seed=5)
    rng = np.random.default_rng(5)
    errors, bands = [], [[] for _ in range(5)]
    for _ in range(3):
        picked = va.draw_batch(rng, np.full(40, 1 / 40), 16)
        rewards = va.draw_rewards(rng, SAMPLES, picked, 4)
        mean = rewards[:, 0].mean()
        own = [(mean - TRUTH[i]) ** 2 for i in picked]
        errors.append(sum(own) / 16)
        for band in range(5):
            inside = [e for e, i in zip(own, picked, strict=True) if band / 5 <= TRUTH[i] < (band + 1) / 5]
            if inside:
                bands[band].append(sum(inside) / len(inside))
    assert found["estimators"]["batch mean"]["mse"] == pytest.approx(errors)
    wanted = [sum(each) / len(each) if each else math.nan for each in bands]
    assert found["estimators"]["batch mean"]["mse_by_band"] == pytest.approx(wanted, nan_ok=True)
    assert len(found["spread"]) == 3


def test_bins_of_spread():
    found = va.bin_means([0.1, 0.15, 0.3, 0.9], [1.0, 3.0, 5.0, 99.0], [0.1, 0.2, 0.25, 0.4])
    assert found == pytest.approx([2.0, math.nan, 5.0], nan_ok=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
@pytest.mark.parametrize("chosen", [0, 20, 99, 229])
def test_the_beta_curve_is_the_error_of_basis_itself_if_it_had_no_other_beta(chosen, smoothing):
    rewards, basis = SAMPLES[:30, 17], Basis(TABLE, smoothing=smoothing)
    beta = float(basis.betas[chosen])
    basis.betas = basis.betas[chosen : chosen + 1]
    result = basis.advantages(va.rollout_batch(IDS[:30], rewards[:, None]))
    curves = va.beta_curves(TABLE, IDS[:30], rewards, TRUTH[:30], smoothing)
    error = sum((float(b) - v) ** 2 for b, v in zip(result.baseline, TRUTH[:30], strict=True)) / 30
    assert curves["refined"][chosen] == pytest.approx(error)
    p = [(SAMPLES[i, :16].sum() + smoothing) / (16 + 2 * smoothing) for i in range(30)]
    initial = [q * math.exp(1 / beta) / (1 - q + q * math.exp(1 / beta)) for q in p]
    wanted = sum((v - t) ** 2 for v, t in zip(initial, TRUTH[:30], strict=True)) / 30
    assert curves["initial"][chosen] == pytest.approx(wanted)


def test_replayed_history_is_that_of_the_batches_in_their_order():
    baseline = va.replay(BVBlend(dict.fromkeys(IDS, 3)), [(IDS[:4], SAMPLES[:4, :8]), (IDS[4:8], SAMPLES[4:8, :8])])
    first, second = SAMPLES[:4, :8].mean(), SAMPLES[4:8, :8].mean()
    assert baseline.history[3][0] == pytest.approx(0.1 * first + 0.9 * second)


def test_rollouts_are_kept_for_their_plan_and_no_other(tmp_path, monkeypatch):
    plan = value_study.QUICK
    names = ("reference", *value_study.STAGES)
    rewards = {key: np.full((2, 3), number, dtype=np.uint8) for number, key in enumerate(names)}
    history = [(["a", "b"], np.array([[1, 0], [0, 0]], dtype=np.uint8))]
    made = {**rewards, "ids": ["a", "b"], "family": [0, 1], "history": history, "seconds": {"warm start": 1.0}}
    makings = iter([made])  # a second making would raise StopIteration
    monkeypatch.setattr(value_study, "make_rollouts", lambda *_: next(makings))
    first = value_study.kept_rollouts(plan, tmp_path)
    again = value_study.kept_rollouts(plan, tmp_path)
    assert first.keys() == again.keys()
    for key in ("ids", "family", "seconds", "origin"):
        assert again[key] == first[key]
    for number, key in enumerate(names):
        assert (again[key] == number).all()
    assert again["history"][0][0] == history[0][0]
    assert np.array_equal(again["history"][0][1], history[0][1])
    with pytest.raises(SystemExit, match="another plan"):
        value_study.kept_rollouts(replace(plan, table=plan.table + 1), tmp_path)


def test_families_are_digits_and_sign():
    found = {family(f"... problem: {text} =") for text in ("3 + 4", "3 - 4", "3 + 44", "3 - 44", "33 + 4", "33 - 44")}
    assert found == {0, 1, 2, 3, 4, 7}


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


def test_seeds_are_averaged_part_by_part():
    found = value_report.averaged([{"a": 1, "b": [1.0, math.nan], "c": "x"}, {"a": 3, "b": [3.0, 5.0], "c": "x"}])
    assert found == {"a": 2, "b": [2.0, 5.0], "c": "x"}
