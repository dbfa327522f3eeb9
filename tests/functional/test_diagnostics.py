"""What is logged of every baseline, against plain loops over the scored rollouts and their action tokens."""

from dataclasses import replace
from statistics import fmean, pvariance

import pytest
import torch

from basis_rl.functional.diagnostics import advantage_metrics
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
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("per_token", [False, True])
def test_metrics_are_those_of_plain_loops(per_token, seed):
    batch = token_batch(seed)
    shape = batch.action_mask.shape if per_token else batch.rewards.shape
    generator = torch.Generator().manual_seed(seed)
    values, baseline = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    baseline[0], baseline[1:3] = 1.0, 0.0
    found = advantage_metrics(batch, Advantages(values=values, baseline=baseline))
    expected = by_loops(batch, values, baseline)
    got = [*(found[f"baseline/{key}"] for key in KEYS), found["advantages/std"]]
    assert got == pytest.approx(expected, abs=1e-12)


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
