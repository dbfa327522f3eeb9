"""Every registered baseline against a plain-loop version of its equation: ragged groups, NaN rewards, shuffled rows."""

import math
from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import build_baseline
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


TOKEN_NAMES = ("otb", "isolated_energy", "ogb", "opo", "opo token")

LOOPS = {
    "none": loop_none,
    "batch_mean": loop_batch_mean,
    "grpo": loop_grpo,
    "dr_grpo": loop_dr_grpo,
    "rloo": loop_rloo,
    "basis": loop_basis,
}


@pytest.mark.parametrize("name", LOOPS)
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


def token_batch(seed, off_policy=False):
    """Ragged groups, groups of one, holes from tool output, padding on either side, missing rewards, shuffled rows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([1, 3, 4, 2, 5])
    groups = torch.repeat_interleave(torch.arange(5), sizes)[torch.randperm(15, generator=generator)]
    mask = torch.rand((15, 11), generator=generator) < 0.7
    mask[:, :2] &= torch.rand((15, 1), generator=generator) < 0.5
    mask[:, 8:] &= torch.rand((15, 1), generator=generator) < 0.5
    mask[4] = False
    rewards = torch.randn(15, generator=generator)
    rewards[torch.rand(15, generator=generator) < 0.15] = math.nan
    return RolloutBatch(
        rewards=rewards,
        group_ids=groups,
        prompt_ids=[f"p{g}" for g in groups.tolist()],
        action_mask=mask,
        energies=torch.rand((15, 11), generator=generator) * 2,
        kl=0.1 * torch.randn((15, 11), generator=generator) if seed % 2 else None,
        rollout_weights=torch.rand((15, 11), generator=generator) * 2 if off_policy else None,
    )


def loop_token(name, batch, tail, cap):
    """Eqs. 8, 21, 52, 60 with every sum written out, over actions counted rollout by rollout."""
    n, width = batch.action_mask.shape
    actions = [[t for t in range(width) if batch.action_mask[i, t]] for i in range(n)]
    reward = batch.rewards.tolist()
    scored = [not math.isnan(r) for r in reward]

    def energy(i, a):
        if name.startswith("opo"):
            return 1.0
        t = actions[i][a]
        rho = 1.0 if cap is None else min(cap, float(batch.rollout_weights[i, t]))
        return rho**2 * float(batch.energies[i, t])

    def weight(i, a):
        if name == "isolated_energy":
            return energy(i, a)
        last = a if name in ("otb", "opo token") else len(actions[i]) - 1
        return sum(energy(i, j) for j in range(last + 1))

    def value(i, a):
        return reward[i] - (0.0 if batch.kl is None else sum(float(batch.kl[i, t]) for t in actions[i][a:]))

    def shared(i, a):
        return [j for j in range(n) if batch.group_ids[j] == batch.group_ids[i] and scored[j] and len(actions[j]) > a]

    def baseline(i, a):
        rows = shared(i, a)
        if len(rows) < 2 and tail == "return" and len(shared(i, 0)) > 1:
            return 0.0
        if len(rows) < 2 and tail == "last":
            a = max((b for b in range(a) if len(shared(i, b)) > 1), default=a)
            rows = shared(i, a)
        return sum(value(j, a) * weight(j, a) for j in rows) / sum(weight(j, a) for j in rows)

    result = torch.zeros((n, width), dtype=torch.float64)
    for i in range(n):
        if scored[i]:
            for a, t in enumerate(actions[i]):
                at = 0 if name in ("ogb", "opo") else a
                result[i, t] = value(i, at) - baseline(i, at)
    return result


TOKEN_CASES = [
    (name, tail, cap)
    for name in TOKEN_NAMES
    for tail in (["zero"] if name in ("ogb", "opo") else ["zero", "last", "return"])
    for cap in ([None] if name.startswith("opo") else [None, 1.3])
]


@pytest.mark.parametrize(("name", "tail", "cap"), TOKEN_CASES)
@pytest.mark.parametrize("seed", range(4))
def test_token_baselines_equal_plain_loop(name, tail, cap, seed):
    sequence, length = name in ("ogb", "opo"), name.startswith("opo")
    params = {} if sequence else {"tail": tail}
    params |= {} if length else {"max_rollout_weight": cap}
    params |= {"form": "token"} if name == "opo token" else {}
    batch = token_batch(seed, off_policy=cap is not None)
    values = build_baseline(name.split()[0], **params).advantages(batch).values
    if values.ndim == 1:
        values = values[:, None] * batch.action_mask
    torch.testing.assert_close(values, loop_token(name, batch, tail, cap), rtol=1e-9, atol=1e-9)


def test_the_tail_of_the_longest_rollout():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    batch = RolloutBatch(
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        prompt_ids=["a", "a"],
        action_mask=mask,
        energies=torch.ones((2, 4)),
    )
    zero = build_baseline("otb").advantages(batch)
    last = build_baseline("otb", tail="last").advantages(batch)
    assert zero.values[0].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert last.values[0].tolist() == [0.5, 0.5, 0.5, 0.5]
    assert zero.metrics["tail"] == pytest.approx(2 / 6)


def test_certain_tokens_fall_back_to_the_plain_mean():
    batch = token_batch(0)
    certain = replace(batch, energies=torch.zeros_like(batch.energies))
    even = replace(batch, energies=torch.ones_like(batch.energies))
    result = build_baseline("isolated_energy").advantages(certain)
    torch.testing.assert_close(result.values, build_baseline("isolated_energy").advantages(even).values)


def loop_reinforce(batch, over, local):
    """Eqs. 4 to 7 written out; `local` subtracts the group mean first."""
    n, width = batch.action_mask.shape
    reward, groups = batch.rewards.tolist(), batch.group_ids.tolist()
    actions = [[t for t in range(width) if batch.action_mask[i, t]] for i in range(n)]
    rows, center = [], {}
    for i in range(n):
        xs = present(group_rows(groups, i), reward)
        if math.isnan(reward[i]) or not actions[i] or (local and len(xs) < 2):
            continue
        rows.append(i)
        center[i] = mean(xs) if local else 0.0

    def value(i, t):
        return (
            reward[i]
            - center[i]
            - (0.0 if batch.kl is None else sum(float(batch.kl[i, j]) for j in actions[i] if j >= t))
        )

    tokens = {i: [value(i, t) for t in actions[i]] for i in rows}
    samples = [mean(tokens[i]) for i in rows] if over == "samples" else [v for i in rows for v in tokens[i]]
    std = math.sqrt(mean([(x - mean(samples)) ** 2 for x in samples]))
    result = torch.zeros((n, width), dtype=torch.float64)
    for i in rows:
        for t in actions[i]:
            result[i, t] = (value(i, t) - mean(samples)) / (std + 1e-8)
    return result


@pytest.mark.parametrize("over", ["samples", "tokens"])
@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("seed", range(4))
def test_reinforce_pp_equals_plain_loop(name, over, seed):
    batch = token_batch(seed)
    values = build_baseline(name, over=over).advantages(batch).values
    assert values.ndim == (1 if batch.kl is None else 2)
    if values.ndim == 1:
        values = values[:, None] * batch.action_mask
    expected = loop_reinforce(batch, over, local=name.endswith("baseline"))
    torch.testing.assert_close(values, expected, rtol=1e-7, atol=1e-7)


def test_equal_rewards_give_zero_everywhere():
    batch = ragged_batch(0, smallest=2)
    equal = replace(batch, rewards=torch.ones_like(batch.rewards))
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        assert (build_baseline(name).advantages(equal).values == 0).all()


def test_remax_is_the_reward_less_the_greedy_one():
    batch = replace(ragged_batch(1, smallest=1), greedy_rewards=None)
    greedy = torch.where(batch.group_ids % 3 == 0, torch.nan, (batch.group_ids % 2).float())
    result = build_baseline("remax").advantages(replace(batch, greedy_rewards=greedy))
    for a, r, g in zip(result.values.tolist(), batch.rewards.tolist(), greedy.tolist(), strict=True):
        assert a == (0.0 if math.isnan(r) or math.isnan(g) else r - g)
    scored = ~batch.rewards.isnan()
    assert result.metrics["undefined"] == pytest.approx(float((scored & greedy.isnan()).sum() / scored.sum()))
    assert result.metrics["greedy"] == pytest.approx(mean(present(range(len(greedy)), greedy.tolist())))
    assert result.baseline.tolist() == [0.0 if math.isnan(g) else g for g in greedy.tolist()]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "batch_mean", "none", "remax"])
def test_kl_in_the_reward_is_taken_off_the_whole_rollout(name):
    """The same advantages as of rewards that are lower by the KL of their tokens, the mask's alone."""
    batch = ragged_batch(2, smallest=2)
    mask = batch.action_mask.clone()
    mask[::2, 2:] = False
    kl = torch.rand(mask.shape, generator=torch.Generator().manual_seed(3))
    batch = replace(batch, action_mask=mask, greedy_rewards=torch.zeros_like(batch.rewards))
    lower = [
        r - sum(k for k, m in zip(ks, ms, strict=True) if m)
        for r, ks, ms in zip(*map(torch.Tensor.tolist, (batch.rewards, kl, mask)), strict=True)
    ]
    found = build_baseline(name).advantages(replace(batch, kl=kl)).values
    expected = build_baseline(name).advantages(replace(batch, rewards=torch.tensor(lower))).values
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("local", [False, True])
def test_the_reported_baseline_of_reinforce_pp_is_what_was_subtracted(local):
    batch = replace(ragged_batch(4, smallest=2), kl=None)
    result = build_baseline("reinforce_pp_baseline" if local else "reinforce_pp").advantages(batch)
    rewards, groups = batch.rewards.tolist(), batch.group_ids.tolist()
    std = result.metrics["batch_std"]
    for i, (reward, value, baseline) in enumerate(
        zip(rewards, result.values.tolist(), result.baseline.tolist(), strict=True)
    ):
        if not math.isnan(reward) and len(present(group_rows(groups, i), rewards)) > 1:
            assert (reward - baseline) / (std + 1e-8) == pytest.approx(value, abs=1e-6)
