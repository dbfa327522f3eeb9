"""The studies' analysis against plain loops, and each study's `--quick` run. Not the outcome: that is measured."""

import itertools
import json
import math
import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from basis_rl.baselines import Basis, BatchMean, BVBlend, DrGrpo, Rloo
from basis_rl.functional.diagnostics import advantage_metrics
from basis_rl.values import ValueTable
from benchmarks.common import machine
from studies import cold_start, score_norms, worked_sums
from studies.otb import analysis as oa
from studies.otb import chain_policy as policy
from studies.otb import study as otb_study
from studies.small_policy import family, problems
from studies.value import analysis as va
from studies.value import report as value_report
from studies.value import study as value_study

RNG = np.random.default_rng(0)
TRUTH = RNG.uniform(size=40)
SAMPLES = (RNG.uniform(size=(40, 24)) < TRUTH[:, None]).astype(np.uint8)
IDS = [f"p{i}" for i in range(40)]
TABLE = ValueTable.from_rewards({p: [float(r) for r in SAMPLES[i, :16]] for i, p in enumerate(IDS)})


# -- value study


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


# -- token baselines


@pytest.fixture(scope="module")
def chain():
    weights = policy.new_parameters(0, 26, width=8)
    weights = {name: 2 * value for name, value in weights.items()}
    ids = policy.respond(weights, torch.tensor([[3, 4]]).repeat(8, 1), 24, seed=0)
    return weights, ids


def test_rewards_follow_the_chain():
    end, pad = policy.END, policy.PAD
    rows = {
        (1, 1, 4, 5, end, pad, pad, pad): 1.0,
        (0, 1, 4, 6, end, pad, pad, pad): 0.0,  # 1 + 4 is not 6
        (1, 1, 3, 4, end, pad, pad, pad): 0.0,  # of the other parity
        (0, 8, 4, 2, 4, 6, end, pad): 1.0,  # 8 + 4 = 2 mod 10
        (1, 5, end, pad, pad, pad, pad, pad): 1.0,
        (1, 9, 3, 2, 1, 3, 4, 7): 0.0,  # no end
        (1, 1, 4, end, pad, pad, pad, pad): 0.0,  # ends between a step and its state
    }
    assert policy.reward(torch.tensor(list(rows))).tolist() == list(rows.values())
    walked = policy.walks(torch.Generator().manual_seed(0), 50, 200)
    ended = (walked == end).any(1)
    right = policy.reward(walked[ended]) == 1
    last = [row[row.index(end) - 1] % 2 == row[0] for row in walked[ended].tolist()]
    assert right.tolist() == last


def test_gradients_are_those_of_autograd_one_response_at_a_time(chain):
    weights, ids = chain
    lengths = policy.action_mask(ids).sum(1)
    assert lengths.min() < lengths.max()
    weightings = torch.randn(len(ids), 2, 24, generator=torch.Generator().manual_seed(1))
    found = policy.gradients(weights, ids, weightings, chunk=3)
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    for row in range(len(ids)):
        for k in range(2):
            total = (policy.log_probs(leaves, ids[row]) * weightings[row, k]).sum()
            grads = torch.autograd.grad(total, list(leaves.values()))
            assert torch.allclose(found[row, k], torch.cat([g.flatten() for g in grads]), atol=1e-4, rtol=1e-3)


def test_energies_are_squared_norms_of_the_gradient_in_the_logits(chain):
    weights, ids = chain
    energies = policy.energies(weights, ids)
    scores = policy.logits(weights, ids)[:, 1:-1, : policy.PAD]
    for row in range(3):
        for t in range(int(policy.action_mask(ids)[row].sum())):
            z = scores[row, t].double().clone().requires_grad_()
            (grad,) = torch.autograd.grad(z.log_softmax(-1)[ids[row, t + 2]], z)
            assert float(energies[row, t]) == pytest.approx(float(grad.square().sum()), abs=1e-5)


def test_moments_are_those_of_a_plain_loop():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    found = oa.moments(a, b)
    products = [float(a[k] @ b[j]) for k in range(5) for j in range(5) if k != j]
    assert found["along"] == pytest.approx(sum(products) / 20)
    apart = [float((row - a.mean(0)) @ (row - a.mean(0))) / 4 for row in a]
    assert [found["variance"], *oa.contributions(oa.deviations(a))] == pytest.approx([sum(apart), *apart])
    means = oa.group_means(torch.arange(12.0).view(6, 2), 3)
    assert means.tolist() == [[2.0, 3.0], [8.0, 9.0]]


def test_otb_variances_of_drawn_groups_are_those_of_a_plain_loop():
    means = np.random.default_rng(2).normal(size=(2, 5, 7))
    products, counts = torch.stack([oa.deviations(torch.tensor(m)) for m in means]), oa.resamples(3, 2, 5, seed=0)
    loop = [[np.repeat(means[p], row[p], 0).var(0, ddof=1).sum() for p in (0, 1)] for row in counts.long().numpy()]
    assert oa.resampled_variances(products, counts).tolist() == pytest.approx(np.mean(loop, axis=1))


def test_otb_intervals_of_few_groups_hold_the_true_ratio():
    held, counts = 0, oa.resamples(400, 4, 6, seed=0)
    for seed in range(200):  # variances of 0.6^2 + 0.3^2 to 1, at 4 prompts of 6 groups
        b, c = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 4, 6, 5)))
        products = [torch.stack([*map(oa.deviations, x)]) for x in (0.6 * b + 0.3 * c, b)]
        low, high = oa.interval(*(oa.resampled_variances(x, counts) for x in products))
        held += low <= 0.45 <= high
    assert 0.92 * 200 <= held <= 0.98 * 200


def test_a_group_mean_keeps_one_less_than_all_of_the_gradient_and_normalises_to_rloo():
    generator = torch.Generator().manual_seed(3)
    rewards = torch.randint(0, 2, (64,), generator=generator).float()
    scores = torch.randn(64, 9, generator=generator) + rewards[:, None]
    mask, ones = torch.ones(64, 3, dtype=torch.bool), torch.ones(64, 3)
    means = {
        name: oa.group_means(oa.advantages(oa.BASELINES[name], rewards, mask, ones, 4)[:, None] * scores, 4)
        for name in ("group mean", "rloo")
    }
    rows = {name: oa.pooled([oa.moments(each, means["rloo"])]) for name, each in means.items()}
    assert rows["rloo"]["kept"] == pytest.approx(1)
    assert rows["group mean"]["kept"] == pytest.approx(3 / 4)
    assert rows["group mean"]["normalised"] == pytest.approx(rows["rloo"]["normalised"])


def test_the_correlation_within_places_knows_nothing_of_their_means():
    places, noise = torch.arange(60) % 5, torch.from_numpy(np.random.default_rng(1).normal(size=(2, 60)))
    x, y = noise[0], 0.5 * noise[0] + noise[1]
    left = [side.clone() for side in (x, y)]
    for place, side in itertools.product(range(5), left):
        side[places == place] -= side[places == place].mean()
    expected = float(torch.corrcoef(torch.stack(left))[0, 1])
    assert oa.correlation_within(x + 100 * places, y + 50 * places, places) == pytest.approx(expected)
    assert oa.correlation(x + 100 * places, y + 50 * places) > 0.99


def test_the_error_of_what_is_kept_is_a_jackknife_over_prompts():
    rows = [{"variance": 1.0, "along": a, "norm2": 1.0, "signal": s} for a, s in ((1.0, 2.0), (2.0, 2.0), (4.0, 5.0))]
    found = oa.pooled(rows)
    left = [6 / 7, 5 / 7, 3 / 4]
    center = sum(left) / 3
    assert found["kept"] == pytest.approx(7 / 9)
    assert found["kept, error"] == pytest.approx(math.sqrt(2 / 3 * sum((x - center) ** 2 for x in left)))
    assert found["normalised"] == pytest.approx(81 / 49)


def test_true_norms_as_weights_are_a_weighted_mean():
    rewards, norms = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 3.0, 2.0, 2.0])
    assert oa.true_norm_advantages(rewards, norms, 2).tolist() == pytest.approx([0.75, -0.25, 0.0, 0.0])


# -- cold start


def test_signal_counts_rollouts_and_groups():
    rewards, advantages = np.array([0, 0, 1, 0, 1, 1]), np.array([0, 0, 0.5, -0.5, 0, 0.2])
    found = cold_start.signal(rewards, advantages, 2)
    assert found == pytest.approx({"reward": 0.5, "rollouts": 0.5, "groups": 2 / 3, "all wrong": 1 / 3, "mixed": 1 / 3})
    assert cold_start.up_and_down(rewards, advantages) == pytest.approx({"on right": 0.7 / 1.2, "on wrong": 0.5 / 1.2})


# -- the policy that works, and what its scores tell


def test_a_worked_sum_is_right_in_every_step():
    rows = problems(300)
    for row, seed in itertools.product(rows, range(3)):
        text = row["prompt"][0]["content"]
        *steps, box = worked_sums.worked(text, Random(seed)).split()
        start = int(re.search(r"(\d+) [+-]", text)[1])
        totals = [start, *(int(step.split("=")[1]) for step in steps)]
        changes = [int(step.split("=")[0]) for step in steps]
        assert [after - before for before, after in itertools.pairwise(totals)] == changes
        assert box == f"\\boxed{{{totals[-1]}}}"
        assert str(totals[-1]) == row["solution"]


@pytest.mark.parametrize("p", [0.2, 0.5, 0.6, 0.75, 0.95])
def test_of_two_answers_the_best_baseline_is_one_minus_the_value(p):
    rewards = (torch.arange(4000) < 4000 * p).float()[None]
    norms = torch.where(rewards == 1, 2 * (1 - p) ** 2, 2 * p**2)  # of the gradient of a softmax in its two logits
    found = score_norms.powers(rewards, norms, norms)
    assert found["best constant"] == pytest.approx(1 - p)
    assert found["power"]["value and rho"] == pytest.approx(found["power"]["best constant"], abs=1e-3)
    assert (found["power"]["value"] > 1) == (p > 2 / 3)
    assert found["power"]["best constant"] == min(found["power"].values(), key=lambda x: round(x, 4))


def test_rho_within_prompts_does_not_tell_hard_from_easy():
    rewards = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    norms = torch.tensor([[1.0, 2, 3, 2], [9, 8, 9, 10], [50, 50, 50, 50], [0.1, 0.1, 0.1, 0.1]])
    assert score_norms.powers(rewards, norms, norms)["rho"] > 10
    found = score_norms.within_prompts(rewards, norms)
    assert found == {"rho within a prompt": pytest.approx(1.0), "mixed prompts": 2}
    norms[1, 1:] *= 4
    assert score_norms.within_prompts(rewards, norms)["rho within a prompt"] == pytest.approx(2.0)


def test_norm_and_energy_of_an_answer_are_those_of_its_tokens():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=13, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=4, tie_word_embeddings=False)
    )  # fmt: skip
    prompt, answer = [1, 2, 3], [4, 5]
    norm, energy = score_norms.norm_and_energy(model, prompt, answer)
    total, expected = {}, 0.0
    for place, token in enumerate(answer):
        model.zero_grad()
        scores = model(input_ids=torch.tensor([prompt + answer[:place]])).logits[0, -1]
        p = scores.softmax(-1)
        expected += float(1 - 2 * p[token] + (p**2).sum())
        p[token].log().backward()
        for name, parameter in model.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad
    assert norm == pytest.approx(sum(float((g**2).sum()) for g in total.values()), rel=1e-4)
    assert energy == pytest.approx(expected, rel=1e-5)


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


def test_the_worked_policy_is_made_once_and_its_scores_can_be_measured(tmp_path):
    few = problems(60)
    worked_sums.worked_model(few, 0, tmp_path, until=1.0, max_steps=6)
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    worked_sums.worked_model(few, 0, tmp_path, until=1.0, max_steps=6)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="right and wrong"):  # six steps teach nothing
        score_norms.main([str(tmp_path), "--problems", "3", "--samples", "3", "--results", str(tmp_path / "out")])


def test_seeds_are_averaged_part_by_part():
    found = value_report.averaged([{"a": 1, "b": [1.0, math.nan], "c": "x"}, {"a": 3, "b": [3.0, 5.0], "c": "x"}])
    assert found == {"a": 2, "b": [2.0, 5.0], "c": "x"}


# -- whole studies


@pytest.mark.parametrize(("study", "plots"), [(value_study, 3), (otb_study, 1), (cold_start, 1)])
def test_quick_run_writes_numbers_and_plots(study, plots, tmp_path):
    study.main(["--quick", "--seeds", "0", "--output", str(tmp_path / "run"), "--results", str(tmp_path)])
    (raw,) = tmp_path.glob("*.json")
    found = json.loads(raw.read_text())
    assert {"cpu", "versions", "plan"} <= set(found)
    assert {frozenset(origin) for origin in found["runs made"]} == {frozenset(machine())}
    assert len(list(tmp_path.glob("*.png"))) == plots
