"""BASIS on simulated rewards, its calibration, its fallback, and rewards that are not 0/1."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from basis_rl.baselines import Basis, BasisHistory, BatchMean
from basis_rl.values import ValueTable
from tests.support.batches import batch_of, table_of_counts


def simulate(beta, n_prompts=64, n_reference=32, seed=0):
    """True values ``V``, a batch of one 0/1 reward a prompt, and a table; ``p ~ Beta(0.8, 0.9)`` as in PAPERS.md."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    p = torch.distributions.Beta(0.8, 0.9).sample((n_prompts,)).double().clamp(1e-6, 1 - 1e-6)
    successes = torch.binomial(torch.full((n_prompts,), float(n_reference)).double(), p, generator=generator)
    truth = torch.sigmoid(torch.logit(p) + (0.0 if beta is None else 1 / beta))
    rewards = {f"p{i}": [1.0] * int(k) + [0.0] * (n_reference - int(k)) for i, k in enumerate(successes)}
    batch = batch_of(torch.bernoulli(truth, generator=generator).float())
    return truth, batch, ValueTable.from_rewards(rewards)


def errors(beta, repeats=40, **params):
    """Mean squared error of the baseline to the true value: BASIS, batch mean; and the median of the betas chosen."""
    ours, theirs, betas = [], [], []
    for seed in range(repeats):
        truth, batch, table = simulate(beta, seed=seed)
        result = Basis(table, **params).advantages(batch)
        ours.append(float(((result.baseline - truth) ** 2).mean()))
        theirs.append(float(((BatchMean().advantages(batch).baseline - truth) ** 2).mean()))
        betas.append(result.metrics["beta"])
    return fmean(ours), fmean(theirs), sorted(betas)[repeats // 2]


@pytest.mark.parametrize("beta", [1.0, 0.5])
@pytest.mark.parametrize("weighting", ["unb", "vop", "rvg"])
def test_mse_is_at_most_031_of_the_batch_mean(beta, weighting):
    ours, theirs, chosen = errors(beta, weighting=weighting)
    assert ours <= 0.31 * theirs
    assert chosen == pytest.approx(beta, rel=0.35)


def test_reference_policy_chooses_the_upper_end_of_the_grid():
    *_, chosen = errors(None)
    assert chosen > 4.0


@pytest.mark.parametrize("beta", [None, 1.0, 0.5])
def test_literal_rule_fails_where_the_common_set_does_not(beta):
    # PAPERS.md, section 1.4: read to the letter, Eq. 6 is worse than the batch mean.
    literal, batch_mean, _ = errors(beta, calibration="literal", smoothing=0.0)
    common, *_ = errors(beta, calibration="common", smoothing=0.0)
    assert literal > 2 * batch_mean
    assert common < batch_mean < literal


def test_inactive_prompts_fall_back_to_zero_without_smoothing():
    table = ValueTable.from_rewards({"p0": [1.0] * 4, "p1": [0.0, 1.0], "p2": [0.0, 0.0, 1.0]})
    batch = batch_of([1.0, 1.0, 0.0])
    paper = Basis(table, smoothing=0.0).advantages(batch)
    assert paper.values[0] == 1.0
    assert paper.metrics["active"] == pytest.approx(2 / 3)
    assert paper.metrics["fallback"] == pytest.approx(1 / 3)
    ours = Basis(table).advantages(batch)
    assert ours.metrics["active"] == 1.0
    assert ours.metrics["fallback"] == 0.0
    assert ours.values[0] < 0.5


@pytest.mark.parametrize("calibration", ["common", "likelihood", "literal"])
def test_fewer_than_two_active_prompts_fall_back(calibration):
    table = ValueTable.from_rewards({"p0": [0.0, 1.0], "p1": [1.0, 1.0]})
    result = Basis(table, smoothing=0.0, calibration=calibration).advantages(batch_of([1.0, 0.0]))
    assert result.values.tolist() == [1.0, 0.0]
    assert result.metrics["fallback"] == 1.0
    assert "calibration_loss" not in result.metrics
    again = Basis(table, smoothing=0.5, calibration=calibration).advantages(batch_of([1.0, 0.0]))
    assert math.isfinite(again.metrics["calibration_loss"])


@pytest.mark.parametrize("kind", [Basis, BasisHistory])
def test_rewards_in_another_unit_give_the_same_baseline_in_that_unit(kind):
    _, batch, table = simulate(1.0)
    plain = kind(table).advantages(batch)
    scaled_table = ValueTable.from_rewards({i: [3 * r - 1 for r in table.rewards(i)] for i in table.prompt_ids})
    scaled = kind(scaled_table).advantages(replace(batch, rewards=3 * batch.rewards - 1))
    torch.testing.assert_close(scaled.baseline, 3 * plain.baseline - 1)
    torch.testing.assert_close(scaled.values, 3 * plain.values)
    assert scaled.metrics["beta"] == pytest.approx(plain.metrics["beta"])


@pytest.mark.parametrize("weighting", ["unb", "vop", "rvg"])
def test_a_batch_without_a_success_reports_the_reference_end(weighting):
    # All betas explain it equally well; 0.01 would say "the best policy that there can be".
    _, batch, table = simulate(1.0)
    result = Basis(table, weighting=weighting).advantages(replace(batch, rewards=torch.zeros_like(batch.rewards)))
    assert result.metrics["beta"] == 5.0
    assert (result.baseline == 0).all()


def test_reward_is_told_apart_by_the_references_value():
    batch = batch_of([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, math.nan])
    metrics = Basis(table_of_counts(), smoothing=0.0).advantages(batch).metrics
    assert {k: v for k, v in metrics.items() if "from" in k} == {
        "reward_from_0.00": 0.5, "reward_from_0.25": 0.5, "reward_from_0.50": 0.5, "reward_from_0.75": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("weighting", ["unb", "vop", "rvg"])
def test_values_at_the_ends_of_the_range_keep_the_baseline_finite(weighting):
    """Without smoothing a tilted value may be 1 to the last bit, and its variance 0."""
    batch = batch_of([1.0] * 7, groups=range(1, 8))
    result = Basis(table_of_counts(), weighting=weighting, smoothing=0.0).advantages(batch)
    assert result.baseline.isfinite().all()
    assert result.metrics["beta"] < 0.5, "all are solved: the policy is far from the reference"
    assert (result.baseline > 0.7).all()
