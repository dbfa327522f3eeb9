"""The field's newer estimators against plain loops: ragged groups, rewards that are missing, rows in any order."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import build_baseline
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from tests.baselines.test_equations import group_rows, mean, present, ragged_batch

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def std(xs):
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def graded(batch, seed):
    """The same batch with rewards between 0 and 1, and those that were missing still so."""
    rewards = torch.rand(len(batch.rewards), generator=torch.Generator().manual_seed(seed))
    return replace(batch, rewards=torch.where(batch.rewards.isnan(), torch.nan, rewards))


def by_group(rewards, groups):
    """Group -> its scored rewards."""
    found = {}
    for r, g in zip(rewards, groups, strict=True):
        found.setdefault(g, [])
        if not math.isnan(r):
            found[g].append(r)
    return found


def loop_james_stein(rewards, groups):
    found, result = by_group(rewards, groups), []
    for i, r in enumerate(rewards):
        own = present([j for j in group_rows(groups, i) if j != i], rewards)
        others = [xs for g, xs in found.items() if g != groups[i] and xs]
        if math.isnan(r) or not own:
            result.append(0.0)
            continue
        center = mean([mean(xs) for xs in others])
        noise = mean([std(xs) ** 2 / len(xs) for xs in others if len(xs) > 1])
        spread = mean([(mean(xs) - center) ** 2 for xs in others])
        weight = noise / (noise + spread)
        result.append(r - (1 - weight) * mean(own) - weight * center)
    return result


def loop_quantile(rewards, groups, level=0.4):
    result = []
    for i, r in enumerate(rewards):
        xs = sorted(present(group_rows(groups, i), rewards))
        if math.isnan(r) or len(xs) < 2:
            result.append(0.0)
            continue
        quantile = next(x for x in xs if sum(y <= x for y in xs) >= level * len(xs))
        result.append((r - quantile) / (std(xs) + 1e-4))
    return result


def loop_max_rl(rewards, groups):
    result = []
    for i, r in enumerate(rewards):
        xs = present(group_rows(groups, i), rewards)
        silent = math.isnan(r) or len(xs) < 2 or mean(xs) == 0
        result.append(0.0 if silent else (r - mean(xs)) / (mean(xs) + 1e-6))
    return result


def loop_w_reinforce(rewards, groups):
    return [0.0 if math.isnan(r) else 0.1 if r == 1 else -1.0 if r == 0 else 0.1 * r - (1 - r) for r in rewards]


def loop_pass_at_k(rewards, groups, k=2):
    """By going through all subsets of k."""
    result = []
    for i, r in enumerate(rewards):
        rows = [j for j in group_rows(groups, i) if not math.isnan(rewards[j])]
        if math.isnan(r) or len(rows) <= k:
            result.append(0.0)
            continue
        passed = {s: float(any(rewards[j] > 0.5 for j in s)) for s in itertools.combinations(rows, k)}
        rho = mean(list(passed.values()))
        own = mean([value for subset, value in passed.items() if i in subset])
        result.append((own - rho) / (math.sqrt(rho * (1 - rho)) + 1e-6))
    return result


LOOPS = {
    "james_stein": loop_james_stein,
    "quantile": loop_quantile,
    "max_rl": loop_max_rl,
    "w_reinforce": loop_w_reinforce,
    "pass_at_k": loop_pass_at_k,
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("rewards", ["binary", "graded"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_plain_loop(name, rewards, seed):
    batch = ragged_batch(seed, smallest=2)
    batch = graded(batch, seed) if rewards == "graded" else batch
    found = build_baseline(name).advantages(batch).values
    expected = LOOPS[name](batch.rewards.tolist(), batch.group_ids.tolist())
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **TOLERANCE)
    assert (found != 0).any()


def test_max_rl_has_a_bound_and_is_silent_where_it_would_have_none():
    batch = ragged_batch(0, smallest=2)
    size = int(batch.group_ids.bincount().max())
    assert 1 < build_baseline("max_rl").advantages(graded(batch, 0)).values.max() < size
    signed = replace(batch, rewards=torch.where(batch.rewards == 0, -0.999, batch.rewards))
    found = build_baseline("max_rl").advantages(signed)
    negative = {int(group) for group in batch.group_ids[signed.rewards < 0]}
    mixed = torch.tensor([int(group) in negative for group in batch.group_ids])
    assert (found.values[mixed] == 0).all()
    assert found.metrics["undefined"] >= float(mixed[~signed.rewards.isnan()].double().mean())


def test_what_is_not_made_for_returns_refuses_kl_in_the_reward():
    assert not build_baseline("max_rl").reads_kl
    assert not build_baseline("pass_at_k").reads_kl
    assert build_baseline("pass_at_k", form="leave_one_out").reads_kl


def test_the_best_of_a_group_gets_its_lead():
    batch = graded(ragged_batch(1, smallest=2), 1)
    found = build_baseline("pass_at_k", form="leave_one_out").advantages(batch).values.tolist()
    rewards, groups = batch.rewards.tolist(), batch.group_ids.tolist()
    for i, r in enumerate(rewards):
        xs = sorted(present(group_rows(groups, i), rewards))
        lead = 0.0 if math.isnan(r) or len(xs) < 2 or r < xs[-1] else xs[-1] - xs[-2]
        assert found[i] == pytest.approx(lead)


@pytest.mark.parametrize("level", [0.25, 0.5, 1.0])
def test_a_quantile_is_a_reward_of_the_group(level):
    batch = graded(ragged_batch(2, smallest=3), 2)
    found = build_baseline("quantile", level=level).advantages(batch).values
    expected = loop_quantile(batch.rewards.tolist(), batch.group_ids.tolist(), level)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **TOLERANCE)


def test_ebpo_equals_a_loop_over_the_run_so_far():
    """Moments of all rewards and of all groups' means, this batch included, taken at once rather than merged."""
    baseline, seen, means = build_baseline("ebpo"), [], []
    for step in range(4):
        batch = graded(ragged_batch(step, smallest=1), step)
        rewards, groups = batch.rewards.tolist(), batch.group_ids.tolist()
        own = by_group(rewards, groups)
        seen += [x for xs in own.values() for x in xs]
        means += [mean(xs) for xs in own.values() if xs]
        prior, noise, between = mean(seen), std(seen) ** 2, std(means) ** 2
        raw, values = {}, [0.0] * len(rewards)
        for i, (r, g) in enumerate(zip(rewards, groups, strict=True)):
            if math.isnan(r) or len(own[g]) < 2:
                continue
            of_mean = noise / len(own[g])
            shrinkage = of_mean / (of_mean + between)
            values[i] = (1 - shrinkage) * mean(own[g]) + shrinkage * prior
            raw[i] = r - values[i]
        center, spread = mean(list(raw.values())), statistics.pstdev(raw.values())
        expected = [(raw[i] - center) / (spread + 1e-6) if i in raw else 0.0 for i in range(len(rewards))]
        found = baseline.advantages(batch)
        torch.testing.assert_close(found.values, torch.tensor(expected, dtype=torch.float64), **TOLERANCE)
        for i in raw:
            assert float(found.baseline[i]) == pytest.approx(values[i], abs=1e-6)
        assert found.metrics["prior"] == pytest.approx(prior)
        baseline.update(batch)


def test_ebpo_discourages_a_group_that_is_all_wrong():
    baseline = build_baseline("ebpo")
    for step in range(3):
        baseline.update(ragged_batch(step, smallest=2))
    batch = ragged_batch(9, smallest=2)
    wrong = batch.group_ids == batch.group_ids[0]
    rewards = torch.where(wrong, 0.0, torch.ones_like(batch.rewards).index_fill(0, torch.tensor([1, 2, 5]), 0.0))
    found = baseline.advantages(replace(batch, rewards=rewards)).values
    assert (found[wrong] < 0).all()


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("forgetting", [0.9, "kl"])
def test_spo_equals_a_loop_of_trackers(table, forgetting):
    counts = {f"p{i}": (i, 8 - i) for i in range(7)}  # two prompts are not in the table
    values = ValueTable.from_rewards({name: [1.0] * a + [0.0] * b for name, (a, b) in counts.items()})
    baseline = build_baseline("spo", values=values if table else None, forgetting=forgetting)
    tracked, seen = {}, {}
    if table:
        for name, (a, _) in counts.items():
            tracked[name] = (8 * (a + 0.5) / 9, 8 - 8 * (a + 0.5) / 9)
    for step in range(4):
        batch = ragged_batch(step, smallest=1)
        log_probs = -0.1 * torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(step))
        batch = replace(batch, log_probs=log_probs)
        rewards, ids = batch.rewards.tolist(), batch.prompt_ids
        away = {}
        for i, r in enumerate(rewards):
            a, b = tracked.get(ids[i], (0.5, 0.5))
            if not math.isnan(r):
                away[i] = r - a / (a + b)
        m, s = mean(list(away.values())), std(list(away.values()))
        expected = [(away[i] - m) / (s + 1e-8) if i in away else 0.0 for i in range(len(rewards))]
        found = baseline.advantages(batch).values
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **TOLERANCE)
        baseline.update(batch)
        for name in set(ids):
            rows = [i for i in away if ids[i] == name]
            if not rows:
                continue
            level = mean([float(log_probs[i].double().mean()) for i in rows])
            rho = forgetting
            if forgetting == "kl":
                rho = min(0.96, max(0.875, 2 ** (-abs(level - seen.get(name, level)) / 0.06)))
            seen[name] = level
            a, b = tracked.get(name, (0.5, 0.5))
            right = sum(rewards[i] for i in rows)
            tracked[name] = (rho * a + right, rho * b + len(rows) - right)
    mean_found, variance = baseline.believed(["p0", "p8", "never"])
    for k, name in enumerate(["p0", "p8", "never"]):
        a, b = tracked.get(name, (0.5, 0.5))
        assert float(mean_found[k]) == pytest.approx(a / (a + b))
        assert float(variance[k]) == pytest.approx(a * b / (a + b) ** 2 / (a + b + 1))


def parts_batch(seed):
    """Three reward functions, some of which do not score some rollouts; one rollout that none scored."""
    batch = ragged_batch(seed, smallest=2)
    generator = torch.Generator().manual_seed(seed)
    parts = torch.rand((len(batch.rewards), 3), generator=generator)
    parts[torch.rand(parts.shape, generator=generator) < 0.2] = torch.nan
    parts[0] = torch.nan
    weights = torch.tensor([1.0, 0.5, 2.0])
    rewards = (parts * weights).nansum(dim=1).masked_fill(parts.isnan().all(dim=1), torch.nan)
    return replace(batch, rewards=rewards, reward_parts=parts, reward_weights=weights)


@pytest.mark.parametrize("seed", range(3))
def test_gdpo_normalises_each_reward_for_itself(seed):
    batch = parts_batch(seed)
    rewards, groups = batch.rewards.tolist(), batch.group_ids.tolist()
    sums = {}
    for i, r in enumerate(rewards):
        if math.isnan(r) or len(present(group_rows(groups, i), rewards)) < 2:
            continue
        sums[i] = 0.0
        for f, weight in enumerate(batch.reward_weights.tolist()):
            column = batch.reward_parts[:, f].tolist()
            xs = present(group_rows(groups, i), column)
            if len(xs) > 1 and not math.isnan(column[i]):
                sums[i] += weight * (column[i] - mean(xs)) / (std(xs) + 1e-4)
    m, s = mean(list(sums.values())), std(list(sums.values()))
    expected = [(sums[i] - m) / (s + 1e-4) if i in sums else 0.0 for i in range(len(rewards))]
    found = build_baseline("gdpo").advantages(batch).values
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **TOLERANCE)


def test_alpha_of_gpg_counts_the_groups_that_teach():
    batch = RolloutBatch(
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, torch.nan]),
        group_ids=torch.tensor([0, 0, 1, 1, 2, 2, 2]),
        prompt_ids=list("aabbccc"),
        action_mask=torch.ones((7, 2), dtype=torch.bool),
    )
    result = build_baseline("dr_grpo", alpha=True).advantages(batch)
    assert result.values.tolist() == pytest.approx([1.5, -1.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert result.metrics["alpha"] == pytest.approx(3.0)


def test_rewards_are_clipped_before_all_else():
    batch = replace(ragged_batch(1, smallest=2), rewards=30.0 * ragged_batch(1, smallest=2).rewards - 15.0)
    clipped = replace(batch, rewards=batch.rewards.clamp(-10, 10))
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        found = build_baseline(name, reward_clip=(-10, 10)).advantages(batch)
        expected = build_baseline(name).advantages(clipped)
        torch.testing.assert_close(found.values, expected.values)
        torch.testing.assert_close(found.baseline, expected.baseline)


def test_the_tables_value_alone():
    table = ValueTable.from_rewards({f"p{i}": [1.0] * i + [0.0] * (8 - i) for i in range(9)})
    batch = ragged_batch(3, smallest=1)
    static = build_baseline("basis", values=table, weighting="none", calibration="none").advantages(batch)
    expected = [(g + 0.5) / 9 for g in batch.group_ids.tolist()]
    torch.testing.assert_close(static.baseline, torch.tensor(expected, dtype=torch.float64))
    batch = replace(batch, rewards=torch.where(batch.group_ids > 2, 1.0, batch.rewards))  # the policy has improved
    static = build_baseline("basis", values=table, weighting="none", calibration="none").advantages(batch)
    tilted = build_baseline("basis", values=table, weighting="none").advantages(batch)
    scored = ~batch.rewards.isnan()
    errors = [((batch.rewards - each.baseline)[scored] ** 2).mean() for each in (tilted, static)]
    assert errors[0] < errors[1]  # beta was chosen for it


@pytest.mark.parametrize("seed", range(2))
def test_least_variance_is_the_weighted_regression_on_all_others(seed):
    """For each row by gradient descent's answer: the normal equations of the others, solved by themselves."""
    table = ValueTable.from_rewards({f"p{i}": [1.0] * i + [0.0] * (8 - i) for i in range(9)})
    baseline = build_baseline("least_variance", values=table)
    for step in range(2):
        batch = ragged_batch(10 * seed + step, smallest=1)
        energies = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(seed))
        batch = replace(batch, energies=energies)
        found = baseline.advantages(batch)
        v = baseline.expected(batch.prompt_ids)
        weights = energies.double().sum(1)
        rewards = batch.rewards.double()
        for i in range(len(rewards)):
            rows = [j for j in range(len(rewards)) if j != i and not math.isnan(rewards[j])]
            ridge = mean([float(weights[j]) for j in rows])
            x = torch.stack([torch.tensor([1.0, float(v[j]), float(v[j]) ** 2]).double() for j in rows])
            x = torch.cat([x * weights[rows].sqrt()[:, None], math.sqrt(ridge) * torch.eye(3).double()])
            y = torch.cat([rewards[rows] * weights[rows].sqrt(), math.sqrt(ridge) * torch.tensor([0.0, 1.0, 0.0])])
            c = torch.linalg.lstsq(x, y.double()[:, None]).solution[:, 0]
            expected = min(1.0, max(0.0, float(c[0] + c[1] * v[i] + c[2] * v[i] ** 2)))
            assert float(found.baseline[i]) == pytest.approx(expected, abs=1e-6)
        baseline.update(batch)
    assert not baseline.uses_own_reward
