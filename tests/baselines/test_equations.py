"""Every registered baseline against a plain-loop version of its equation: ragged groups, NaN rewards, shuffled rows."""

import math

import pytest
import torch

from basis_rl.baselines import BASELINES, build_baseline
from basis_rl.functional.tilt import beta_grid
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable

N_REFERENCE = 8


def ragged_batch(seed, smallest):
    """Groups of `smallest` to `smallest + 3` rollouts, a fifth of the rewards missing, rows in random order."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(smallest, smallest + 4, (9,), generator=generator)
    groups = torch.repeat_interleave(torch.arange(9), sizes)
    groups = groups[torch.randperm(len(groups), generator=generator)]
    rewards = torch.randint(0, 2, (len(groups),), generator=generator).float()
    rewards[torch.rand(len(groups), generator=generator) < 0.2] = math.nan
    mask = torch.ones((len(groups), 4), dtype=torch.bool)
    return RolloutBatch(
        rewards=rewards, group_ids=groups, prompt_ids=[f"p{g}" for g in groups.tolist()], action_mask=mask
    )


def table():
    return ValueTable.from_rewards({f"p{i}": [1.0] * i + [0.0] * (N_REFERENCE - i) for i in range(9)})


def present(rows, rewards):
    return [rewards[j] for j in rows if not math.isnan(rewards[j])]


def mean(xs):
    return sum(xs) / len(xs)


def group_rows(groups, i):
    return [j for j in range(len(groups)) if groups[j] == groups[i]]


def loop_none(rewards, groups):
    return rewards


def loop_batch_mean(rewards, groups):
    center = mean(present(range(len(rewards)), rewards))
    return [r - center for r in rewards]


def loop_dr_grpo(rewards, groups):
    return [r - mean(present(group_rows(groups, i), rewards) or [0.0]) for i, r in enumerate(rewards)]


def loop_grpo(rewards, groups):
    result = []
    for i, r in enumerate(rewards):
        xs = present(group_rows(groups, i), rewards)
        if len(xs) < 2:
            result.append(0.0)
            continue
        std = math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))
        result.append((r - mean(xs)) / (std + 1e-4))
    return result


def loop_rloo(rewards, groups):
    result = []
    for i, r in enumerate(rewards):
        others = present([j for j in group_rows(groups, i) if j != i], rewards)
        result.append(r - mean(others) if others else 0.0)
    return result


def loop_basis(rewards, groups):
    """Algorithm 1 with Jeffreys smoothing and the common set, every sum written out."""
    p = [(g + 0.5) / (N_REFERENCE + 1) for g in groups]
    best = (math.inf, None)
    for beta in beta_grid().tolist():
        v = [1 / (1 + math.exp(-(math.log(q / (1 - q)) + 1 / beta))) for q in p]
        v = [min(max(x, 1e-6), 1 - 1e-6) for x in v]
        b, errors = [], []
        for i in range(len(rewards)):
            sources = [j for j in range(len(rewards)) if j != i and not math.isnan(rewards[j])]
            top = sum(v[j] * rewards[j] / (v[j] * (1 - v[j])) for j in sources)
            bottom = sum(v[j] ** 2 / (v[j] * (1 - v[j])) for j in sources)
            b.append(v[i] * top / bottom)
            if not math.isnan(rewards[i]):
                errors.append((rewards[i] - b[i]) ** 2)
        if mean(errors) < best[0]:
            best = (mean(errors), b)
    return [r - b for r, b in zip(rewards, best[1], strict=True)]


LOOPS = {
    "none": loop_none,
    "batch_mean": loop_batch_mean,
    "grpo": loop_grpo,
    "dr_grpo": loop_dr_grpo,
    "rloo": loop_rloo,
    "basis": loop_basis,
}


def test_every_baseline_has_a_loop():
    assert set(LOOPS) == set(BASELINES)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("seed", range(3))
def test_equals_plain_loop(name, seed):
    baseline = build_baseline(name, **({"values": table()} if name == "basis" else {}))
    batch = ragged_batch(seed, smallest=1 if name == "basis" else 2)
    result = baseline.advantages(batch)
    expected = [0.0 if math.isnan(a) else a for a in LOOPS[name](batch.rewards.tolist(), batch.group_ids.tolist())]
    torch.testing.assert_close(result.values, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_reduced_to_one_scored_row_gets_zero(name):
    batch = RolloutBatch(
        rewards=torch.tensor([1.0, math.nan, 1.0, 0.0]),
        group_ids=torch.tensor([0, 0, 1, 1]),
        prompt_ids=["a", "a", "b", "b"],
        action_mask=torch.ones((4, 2), dtype=torch.bool),
    )
    result = build_baseline(name).advantages(batch)
    assert result.values[:2].tolist() == [0.0, 0.0]
    assert result.values[2] > 0
    assert result.metrics["undefined"] == pytest.approx(1 / 3)
