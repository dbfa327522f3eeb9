"""`poise` against a plain loop; its baseline does not see the own reward or the own completion; its probes learn."""

import math
from dataclasses import replace
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch

from basis_rl.baselines import Poise
from basis_rl.functional.regression import ridge_predictions
from tests.support.batches import batch_of

WIDTH = 3


def drawn(seed, sizes=(1, 2, 3, 2, 1, 2), unscored=False):
    """Ragged groups with features that tell something of the reward; a row without tokens, rewards missing."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    groups = groups[torch.randperm(len(groups), generator=generator)]
    states = torch.randn((len(groups), 2, WIDTH), generator=generator)
    states[:, 0] = states[:, 0][groups]
    rewards = (states[:, 0, 0] + 0.3 * torch.randn(len(groups), generator=generator) > 0).float()
    mask = torch.rand((len(groups), 14), generator=generator) < 0.9
    if unscored:
        rewards[2] = torch.nan
        mask[3] = False
    entropies = torch.rand(mask.shape, generator=generator)
    return batch_of(rewards, groups=groups, action_mask=mask, entropies=entropies, hidden_states=states, step=seed)


def loop_features(batch, row):
    own = batch.entropies[row][batch.action_mask[row]].tolist()
    return [*batch.hidden_states[row].flatten().tolist(), fmean(own), pstdev(own), fmean(own[-10:])]


def loop_ridge(rows, targets, asked, widths, penalty):
    """The primal form, by least squares with a row more for each coefficient."""
    rows = np.array(rows)
    roots = np.concatenate([[width**0.5] * width for width in widths])
    center, scale = rows.mean(axis=0), np.maximum(rows.std(axis=0), 1e-6) * roots
    z = (rows - center) / scale
    system = np.vstack([z, penalty**0.5 * np.eye(len(roots))])
    mean = fmean(targets)
    coefficients = np.linalg.lstsq(system, np.array([y - mean for y in targets] + [0.0] * len(roots)), rcond=None)[0]
    found = mean + float((np.array(asked) - center) / scale @ coefficients)
    return min(max(found, min(targets)), max(targets))


def loop_baselines(seen, batch, penalty):
    """b of each row that has tokens and a reward, from the batches that were seen."""
    crossed, own = [], []
    for each in seen:
        rewards, groups = each.rewards.tolist(), each.group_ids.tolist()
        for i, r in enumerate(rewards):
            if not each.action_mask[i].any():
                continue
            features = loop_features(each, i)
            mates = [x for j, x in enumerate(rewards) if groups[j] == groups[i] and j != i and not math.isnan(x)]
            if mates:
                crossed.append((features, fmean(mates)))
            if not math.isnan(r):
                own.append((features[:WIDTH], r))
    found = {}
    groups = batch.group_ids.tolist()
    has_tokens = batch.action_mask.any(dim=1).tolist()
    for i in range(len(groups)):
        mates = [j for j in range(len(groups)) if groups[j] == groups[i] and j != i and has_tokens[j]]
        if not has_tokens[i] or math.isnan(batch.rewards[i]):
            continue
        if mates:
            given = [*zip(*crossed, strict=True)]
            values = [loop_ridge(*given, loop_features(batch, j), [WIDTH, WIDTH, 3], penalty) for j in mates]
            found[i] = fmean(values)
        else:
            given = [*zip(*own, strict=True)]
            found[i] = loop_ridge(*given, loop_features(batch, i)[:WIDTH], [WIDTH], penalty)
    return found


@pytest.mark.parametrize("penalty", [0.3, 3.0])
def test_baselines_are_those_of_a_plain_loop(penalty):
    baseline = Poise(penalty=penalty)
    seen = [drawn(seed, unscored=True) for seed in range(4)]
    for each in seen:
        baseline.update(each)
    batch = drawn(9, unscored=True)
    found = baseline.advantages(batch)
    expected = loop_baselines(seen, batch, penalty)
    assert len(expected) == len(batch.rewards) - 2
    for row, value in expected.items():
        assert float(found.baseline[row]) == pytest.approx(value, abs=1e-5)
        assert float(found.values[row]) == pytest.approx(float(batch.rewards[row]) - value, abs=1e-5)
    assert float(found.baseline.std()) > 0.1


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 1, 1, 1, 1, 1)], ids=["of two", "alone"])
def test_the_baseline_of_a_rollout_does_not_see_its_completion(sizes):
    """Another completion with another reward, of which the state at the prompt's end knows nothing."""
    baseline = Poise()
    for seed in range(3):
        baseline.update(drawn(seed, sizes))
    batch = drawn(9, sizes)
    before = baseline.advantages(batch).baseline
    for row in range(len(batch.rewards)):
        changed = {name: getattr(batch, name).clone() for name in ("hidden_states", "entropies", "rewards")}
        changed["hidden_states"][row, 1] += 2.0
        changed["entropies"][row] *= 3.0
        changed["rewards"][row] = 1 - changed["rewards"][row]
        after = baseline.advantages(replace(batch, **changed)).baseline
        # A mean of others is the sum of all less the own, in float64.
        assert abs(float(after[row] - before[row])) < 1e-14
        mates = (batch.group_ids == batch.group_ids[row]) & (torch.arange(len(before)) != row)
        assert (after[mates] != before[mates]).all()


def test_before_the_first_batch_it_is_the_mean_of_the_other_rollouts():
    batch = drawn(0, (1,) * 6)
    total = batch.rewards.double().sum()
    torch.testing.assert_close(Poise().advantages(batch).baseline, (total - batch.rewards.double()) / 5)


def test_the_memory_holds_the_last_rollouts():
    short, fresh = Poise(memory=11), Poise()
    for seed in range(5):
        short.update(drawn(seed))
    fresh.update(drawn(4))
    batch = drawn(9)
    torch.testing.assert_close(short.advantages(batch).baseline, fresh.advantages(batch).baseline)
    assert short.advantages(batch).metrics["remembered"] == 11.0


@pytest.mark.parametrize("size", [1, 2])
def test_the_probes_explain_rewards_that_the_states_tell(size):
    baseline = Poise()
    for seed in range(20):
        baseline.update(drawn(seed, (size,) * 16))
    batch = drawn(99, (size,) * 64)
    found = baseline.advantages(batch)
    assert float(found.values.var()) < 0.6 * float(batch.rewards.var())
    assert found.metrics["crossed"] == float(size > 1)


def test_a_feature_that_never_varied_tells_nothing():
    seen = torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
    targets = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    found = ridge_predictions(seen, targets, torch.tensor([[2.5, 5.0], [2.5, 900.0]]), [2], 1.0)
    assert found[0] == found[1] > 0.5
