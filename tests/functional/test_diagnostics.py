"""What is logged of every baseline, against plain loops over the scored rollouts and their action tokens."""

from dataclasses import replace
from statistics import fmean, pvariance

import pytest
import torch

from basis_rl.functional.diagnostics import advantage_metrics, mean_by
from basis_rl.types import Advantages
from tests.baselines.test_equations import token_batch

KEYS = ("mean", "mse_to_reward", "at_bounds", "explained_variance")


def by_loops(batch, values, baseline):
    rewards, mask = batch.rewards.tolist(), batch.action_mask.tolist()
    pairs = []
    for i, reward in enumerate(rewards):
        if reward != reward:
            continue
        for t, action in enumerate(mask[i]):
            if action and values.ndim == 2:
                pairs.append((reward, float(baseline[i, t]), float(values[i, t])))
        if values.ndim == 1 and any(mask[i]):
            pairs.append((reward, float(baseline[i]), float(values[i])))
    missed = [r - b for r, b, _ in pairs]
    return (
        fmean(b for _, b, _ in pairs),
        fmean(d * d for d in missed),
        fmean(b in (0.0, 1.0) for _, b, _ in pairs),
        1 - pvariance(missed) / pvariance([r for r, _, _ in pairs]),
        pvariance([v for _, _, v in pairs]) ** 0.5,
        max(abs(v) for _, _, v in pairs),
    )


def shares_by_loops(batch, values):
    """Of the rollouts that count, those whose every advantage is 0; of all, those without a reward."""
    rewards, mask = batch.rewards.tolist(), batch.action_mask.tolist()
    rows = [i for i, reward in enumerate(rewards) if reward == reward and any(mask[i])]
    of = [[float(v) for v, m in zip(values[i].expand(len(mask[i])), mask[i], strict=True) if m] for i in rows]
    return fmean(not any(row) for row in of), fmean(reward != reward for reward in rewards)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("per_token", [False, True])
def test_metrics_are_those_of_plain_loops(per_token, seed):
    batch = token_batch(seed)
    shape = batch.action_mask.shape if per_token else batch.rewards.shape
    generator = torch.Generator().manual_seed(seed)
    values, baseline = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    baseline[0], baseline[1:3] = 1.0, 0.0
    values[5:9] = 0.0
    values[12] = -1.5
    values[batch.rewards.isnan()] = 9.0  # counts for nothing
    if per_token:
        values[:, ::2] = 0.0  # many rows have a 0 among others
    found = advantage_metrics(batch, Advantages(values=values, baseline=baseline))
    expected = by_loops(batch, values, baseline)
    got = [*(found[f"baseline/{key}"] for key in KEYS), found["advantages/std"], found["advantages/max_abs"]]
    assert got == pytest.approx(expected, abs=1e-12)
    shares = found["advantages/zero"], found["reward/unscored"]
    assert shares == pytest.approx(shares_by_loops(batch, values), abs=1e-12)
    assert shares[0] not in (0.0, 1.0)


def test_rewards_are_averaged_by_label_and_labels_without_one_left_out():
    nan = float("nan")
    found = mean_by(["b", "a", "b", "c", "a", "b"], torch.tensor([1.0, 0.5, 0.0, nan, nan, 0.5]))
    assert list(found.items()) == [("a", 0.5), ("b", 0.5)]
    assert mean_by(["x", "x", "x"], torch.tensor([1.0, 0.0, 0.5])) == {"x": 0.5}


def test_explained_variance_of_the_reward_itself_of_a_number_and_of_equal_rewards():
    batch = token_batch(0)
    known = torch.nan_to_num(batch.rewards.double())

    def explained(baseline, of=batch):
        result = Advantages(values=torch.zeros_like(baseline), baseline=baseline)
        return advantage_metrics(of, result).get("baseline/explained_variance")

    assert explained(known) == pytest.approx(1.0)
    assert explained(torch.full_like(known, 0.3)) == pytest.approx(0.0)
    batch.rewards[:] = 0.3
    assert explained(known) is None
    rounded = torch.full_like(known, 0.3)
    rounded[::2] = 0.1 + 0.2
    assert len(set(rounded.tolist())) == 2
    assert explained(known, replace(batch, rewards=rounded)) is None
