"""Every registered baseline against a plain-loop version of its equation: ragged groups, NaN rewards, shuffled rows."""

import functools
import itertools
import math
from dataclasses import replace
from statistics import fmean, pstdev, stdev

import pytest
import torch

from basis_rl.baselines import build_baseline
from basis_rl.functional.basis import beta_grid
from tests.support.batches import batch_of, table_of_counts

N_REFERENCE = 8


def ragged_batch(seed, smallest):
    """Groups of `smallest` to `smallest + 3` rollouts, a fifth of the rewards missing, rows in random order."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(smallest, smallest + 4, (9,), generator=generator)
    groups = torch.repeat_interleave(torch.arange(9), sizes)
    groups = groups[torch.randperm(len(groups), generator=generator)]
    rewards = torch.randint(0, 2, (len(groups),), generator=generator).float()
    rewards[torch.rand(len(groups), generator=generator) < 0.2] = math.nan
    return batch_of(rewards, groups=groups, action_mask=torch.ones((len(groups), 4), dtype=torch.bool))


def present(rows, rewards):
    return [rewards[j] for j in rows if not math.isnan(rewards[j])]


def assert_values(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def graded(batch, seed):
    """The same batch with rewards between 0 and 1, and those that were missing still so."""
    rewards = torch.rand(len(batch.rewards), generator=torch.Generator().manual_seed(seed))
    return replace(batch, rewards=torch.where(batch.rewards.isnan(), torch.nan, rewards))


def group_rows(groups, i):
    return [j for j in range(len(groups)) if groups[j] == groups[i]]


def by_group(rewards, groups):
    """Group -> its scored rewards."""
    return {g: present(group_rows(groups, i), rewards) for i, g in enumerate(groups)}


def of_group(formula, least=2):
    """``formula(reward, scored rewards of its group)``, and 0 in a group with fewer than `least` of them."""

    def loop(rewards, groups):
        found = by_group(rewards, groups)
        scored = [not math.isnan(r) and len(found[g]) >= least for r, g in zip(rewards, groups, strict=True)]
        return [formula(r, found[g]) if s else 0.0 for r, g, s in zip(rewards, groups, scored, strict=True)]

    return loop


def lead_of_the_best(r, xs):
    first, second = sorted(xs, reverse=True)[:2]
    return first - second if r == first else 0.0


def loop_batch_mean(rewards, groups):
    center = fmean(present(range(len(rewards)), rewards))
    return [0.0 if math.isnan(r) else r - center for r in rewards]


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
        if fmean(errors) < best[0]:
            best = (fmean(errors), b)
    return [0.0 if math.isnan(r) else r - b for r, b in zip(rewards, best[1], strict=True)]


def loop_a_star_po(rewards, groups):
    """Prompt g has g right ones of the reference rollouts."""
    optimal = [0.5 * math.log((g * math.exp(1 / 0.5) + N_REFERENCE - g) / N_REFERENCE) for g in groups]
    return [0.0 if math.isnan(r) else r - v for r, v in zip(rewards, optimal, strict=True)]


TOKEN_NAMES = ("otb", "isolated_energy", "ogb", "opo", "opo token")


def loop_james_stein(rewards, groups):
    found, result = by_group(rewards, groups), []
    for i, r in enumerate(rewards):
        own = present([j for j in group_rows(groups, i) if j != i], rewards)
        others = [xs for g, xs in found.items() if g != groups[i] and xs]
        if math.isnan(r) or not own:
            result.append(0.0)
            continue
        center = fmean([fmean(xs) for xs in others])
        noise = fmean([stdev(xs) ** 2 / len(xs) for xs in others if len(xs) > 1])
        spread = fmean([(fmean(xs) - center) ** 2 for xs in others])
        weight = noise / (noise + spread)
        result.append(r - (1 - weight) * fmean(own) - weight * center)
    return result


def loop_pass_at_k(rewards, groups, k=2):
    """By going through all subsets of k."""
    result = []
    for i, r in enumerate(rewards):
        rows = [j for j in group_rows(groups, i) if not math.isnan(rewards[j])]
        if math.isnan(r) or len(rows) <= k:
            result.append(0.0)
            continue
        passed = {s: float(any(rewards[j] > 0.5 for j in s)) for s in itertools.combinations(rows, k)}
        rho = fmean(list(passed.values()))
        own = fmean([value for subset, value in passed.items() if i in subset])
        result.append((own - rho) / (math.sqrt(rho * (1 - rho)) + 1e-6))
    return result


# Baseline, and parameters of each case, with its loop.
LOOPS = [
    ("none", {}, of_group(lambda r, xs: r, least=1)),
    ("batch_mean", {}, loop_batch_mean),
    ("grpo", {}, of_group(lambda r, xs: (r - fmean(xs)) / (stdev(xs) + 1e-4))),
    ("dr_grpo", {}, of_group(lambda r, xs: r - fmean(xs))),
    ("rloo", {}, of_group(lambda r, xs: r - (sum(xs) - r) / (len(xs) - 1))),
    ("basis", {"values": table_of_counts(N_REFERENCE)}, loop_basis),
    ("a_star_po", {"values": table_of_counts(N_REFERENCE)}, loop_a_star_po),
    ("james_stein", {}, loop_james_stein),
    ("max_rl", {}, of_group(lambda r, xs: (r - fmean(xs)) / (fmean(xs) + 1e-6) if fmean(xs) else 0.0)),
    *(("pass_at_k", {"k": k}, functools.partial(loop_pass_at_k, k=k)) for k in (1, 2)),
    ("pass_at_k", {"form": "leave_one_out"}, of_group(lead_of_the_best)),
]


@pytest.mark.parametrize(("name", "params", "loop"), LOOPS)
@pytest.mark.parametrize("rewards", ["binary", "graded"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_plain_loop(name, params, loop, rewards, seed):
    batch = ragged_batch(seed, smallest=1)
    batch = graded(batch, seed) if rewards == "graded" else batch
    found = build_baseline(name, **params).advantages(batch).values
    assert_values(found, loop(batch.rewards.tolist(), batch.group_ids.tolist()))
    assert (found != 0).any()


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
    return batch_of(
        rewards,
        groups=groups,
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


def test_the_share_of_tokens_of_a_tail_is_reported():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    batch = batch_of([1.0, 0.0], groups=[0, 0], action_mask=mask, energies=torch.ones((2, 4)))
    assert build_baseline("otb").advantages(batch).metrics["tail"] == pytest.approx(2 / 6)


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
        center[i] = fmean(xs) if local else 0.0

    def value(i, t):
        return (
            reward[i]
            - center[i]
            - (0.0 if batch.kl is None else sum(float(batch.kl[i, j]) for j in actions[i] if j >= t))
        )

    tokens = {i: [value(i, t) for t in actions[i]] for i in rows}
    samples = [fmean(tokens[i]) for i in rows] if over == "samples" else [v for i in rows for v in tokens[i]]
    center_of_all, std = fmean(samples), pstdev(samples)
    result = torch.zeros((n, width), dtype=torch.float64)
    for i in rows:
        for t in actions[i]:
            result[i, t] = (value(i, t) - center_of_all) / (std + 1e-8)
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


def test_remax_is_the_reward_less_the_greedy_one():
    batch = ragged_batch(1, smallest=1)
    greedy = torch.where(batch.group_ids % 3 == 0, torch.nan, (batch.group_ids % 2).float())
    result = build_baseline("remax").advantages(replace(batch, greedy_rewards=greedy))
    for a, r, g in zip(result.values.tolist(), batch.rewards.tolist(), greedy.tolist(), strict=True):
        assert a == (0.0 if math.isnan(r) or math.isnan(g) else r - g)
    scored = ~batch.rewards.isnan()
    assert result.metrics["undefined"] == pytest.approx(float((scored & greedy.isnan()).sum() / scored.sum()))
    assert result.metrics["greedy"] == pytest.approx(fmean(present(range(len(greedy)), greedy.tolist())))
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


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_the_reported_baseline_of_reinforce_pp_is_what_was_subtracted(name):
    batch = ragged_batch(4, smallest=2)
    result = build_baseline(name).advantages(batch)
    taught = result.values != 0
    left = (batch.rewards - result.baseline) / (result.metrics["batch_std"] + 1e-8)
    torch.testing.assert_close(left[taught], result.values[taught], rtol=0, atol=1e-6)
    assert taught.sum() > 10


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


@pytest.mark.parametrize(("params", "least"), [({"k": 1}, 2), ({}, 3), ({"k": 3}, 4), ({"form": "leave_one_out"}, 2)])
def test_pass_at_k_needs_more_rollouts_than_the_set_has(params, least):
    """It tells so, and of a group that is as small its advantages are 0 because they are undefined."""
    baseline = build_baseline("pass_at_k", **params)
    assert baseline.min_group_size == least
    for size in range(1, 6):
        found = baseline.advantages(batch_of([1.0] + [0.0] * (size - 1), groups=[0] * size))
        assert found.metrics["undefined"] == float(size < least)
        assert bool(found.values.any()) == (size >= least)


def test_james_stein_of_one_prompt_is_the_mean_of_its_other_rollouts():
    for others in ([], [math.nan, math.nan]):
        batch = batch_of([1.0, 0.0, 0.25, *others], groups=[0, 0, 0, *(1 for _ in others)])
        found = build_baseline("james_stein").advantages(batch)
        assert_values(found.values, [0.875, -0.625, -0.25, *(0.0 for _ in others)])


def test_the_weight_of_james_stein_is_told_of_the_noise_of_other_prompts():
    """Of three prompts, by hand: what the means of the two others are apart, and how noisy they are."""
    batch = batch_of([1.0, 0.0, 0.5, 0.5, 1.0, 1.0], groups=[0, 0, 1, 1, 2, 2])
    found = build_baseline("james_stein").advantages(batch)
    spread = [0.25**2, 0.25**2, 0.0]
    noise = [0.0, 0.125, 0.125]
    weights = [n / (n + s) for n, s in zip(noise, spread, strict=True)]
    assert found.metrics["shrinkage"] == pytest.approx(fmean(weights))
    others = zip(weights, (0.75, 0.75, 0.5), (0.0, 0.5, 1.0), strict=True)
    assert found.baseline[::2].tolist() == pytest.approx([w * mean + (1 - w) * own for w, mean, own in others])
    alone = build_baseline("james_stein").advantages(batch_of([1.0, 1.0, 0.5], groups=[0, 0, 1]))
    assert alone.metrics["shrinkage"] == 0.0, "one other prompt has no spread, and equal rollouts have no noise"
    alone = build_baseline("james_stein").advantages(batch_of([1.0, 0.0], groups=[0, 0]))
    assert alone.metrics["shrinkage"] == 0.0


def test_ebpo_equals_a_loop_over_the_run_so_far():
    """Moments of all rewards and of all groups' means, this batch included, taken at once rather than merged."""
    baseline, seen, means = build_baseline("ebpo"), [], []
    for step in range(4):
        batch = graded(ragged_batch(step, smallest=1), step)
        rewards, groups = batch.rewards.tolist(), batch.group_ids.tolist()
        own = by_group(rewards, groups)
        seen += [x for xs in own.values() for x in xs]
        means += [fmean(xs) for xs in own.values() if xs]
        prior, noise, between = fmean(seen), stdev(seen) ** 2, stdev(means) ** 2
        raw, values = {}, [0.0] * len(rewards)
        for i, (r, g) in enumerate(zip(rewards, groups, strict=True)):
            if math.isnan(r) or len(own[g]) < 2:
                continue
            of_mean = noise / len(own[g])
            shrinkage = of_mean / (of_mean + between)
            values[i] = (1 - shrinkage) * fmean(own[g]) + shrinkage * prior
            raw[i] = r - values[i]
        center, spread = fmean(raw.values()), pstdev(raw.values())
        expected = [(raw[i] - center) / (spread + 1e-6) if i in raw else 0.0 for i in range(len(rewards))]
        found = baseline.advantages(batch)
        assert_values(found.values, expected)
        for i in raw:
            assert float(found.baseline[i]) == pytest.approx(values[i], abs=1e-6)
        assert found.metrics["prior"] == pytest.approx(prior)
        baseline.update(batch)


def test_the_gradient_of_a_star_po_is_that_of_its_regression():
    """On the policy's own rollouts, up to the factor 2 beta2."""
    batch = ragged_batch(0, smallest=1)
    shape, beta2 = batch.action_mask.shape, 0.05
    generator = torch.Generator().manual_seed(0)
    reference, log_probs = -torch.rand(2, *shape, generator=generator, dtype=torch.float64)
    log_probs.requires_grad_()
    ratio = torch.where(batch.action_mask, log_probs - reference, 0.0)
    baseline = build_baseline("a_star_po", values=table_of_counts(N_REFERENCE))
    found = baseline.advantages(replace(batch, kl=beta2 * ratio.detach()))
    scored = ~batch.rewards.isnan()
    missed = beta2 * ratio.sum(dim=1) - (batch.rewards.double() - found.baseline)
    regression = torch.autograd.grad((missed[scored] ** 2).sum(), log_probs, retain_graph=True)[0]
    reinforce = torch.autograd.grad(-(found.values * ratio.sum(dim=1)).sum(), log_probs)[0]
    torch.testing.assert_close(regression, 2 * beta2 * reinforce)


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("forgetting", [0.9, "kl"])
def test_spo_equals_a_loop_of_trackers(table, forgetting):
    # Two prompts, p7 and p8, are not in the table.
    baseline = build_baseline("spo", values=table_of_counts(6) if table else None, forgetting=forgetting)
    tracked, seen = {}, {}
    if table:
        tracked = {f"p{i}": (8 * (i + 0.5) / 7, 8 - 8 * (i + 0.5) / 7) for i in range(7)}
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
        m, s = fmean(away.values()), stdev(away.values())
        expected = [(away[i] - m) / (s + 1e-8) if i in away else 0.0 for i in range(len(rewards))]
        assert_values(baseline.advantages(batch).values, expected)
        baseline.update(batch)
        for name in set(ids):
            rows = [i for i in away if ids[i] == name]
            if not rows:
                continue
            level = fmean([float(log_probs[i].double().mean()) for i in rows])
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
    """Three reward functions, some of which do not score some rollouts; one rollout that none scored.

    Groups of one rollout, and rollouts without a token that is trained on.
    """
    batch = ragged_batch(seed, smallest=1)
    generator = torch.Generator().manual_seed(seed)
    parts = torch.rand((len(batch.rewards), 3), generator=generator)
    parts[torch.rand(parts.shape, generator=generator) < 0.2] = torch.nan
    parts[0] = torch.nan
    weights = torch.tensor([1.0, 0.5, 2.0])
    rewards = (parts * weights).nansum(dim=1).masked_fill(parts.isnan().all(dim=1), torch.nan)
    mask = batch.action_mask & (torch.arange(len(rewards)) % 5 != 2)[:, None]
    return replace(batch, rewards=rewards, reward_parts=parts, reward_weights=weights, action_mask=mask)


@pytest.mark.parametrize("seed", range(3))
def test_gdpo_normalises_each_reward_for_itself(seed):
    batch = parts_batch(seed)
    trained = batch.action_mask.any(dim=1)
    rewards = torch.where(trained, batch.rewards, torch.nan).tolist()
    parts = torch.where(trained[:, None], batch.reward_parts, torch.nan)
    groups = batch.group_ids.tolist()
    sums = {}
    for i, r in enumerate(rewards):
        if math.isnan(r) or len(present(group_rows(groups, i), rewards)) < 2:
            continue
        sums[i] = 0.0
        for f, weight in enumerate(batch.reward_weights.tolist()):
            column = parts[:, f].tolist()
            xs = present(group_rows(groups, i), column)
            if len(xs) > 1 and not math.isnan(column[i]):
                sums[i] += weight * (column[i] - fmean(xs)) / (stdev(xs) + 1e-4)
    m, s = fmean(sums.values()), stdev(sums.values())
    expected = [(sums[i] - m) / (s + 1e-4) if i in sums else 0.0 for i in range(len(rewards))]
    found = build_baseline("gdpo").advantages(batch)
    assert_values(found.values, expected)
    scored = len(present(range(len(rewards)), rewards))
    assert found.metrics["undefined"] == pytest.approx(1 - len(sums) / scored)
    assert 0 < len(sums) < scored
    means = [fmean(present(group_rows(groups, i), rewards) or [0.0]) for i in range(len(rewards))]
    assert_values(found.baseline, means)


def test_alpha_of_gpg_counts_the_groups_that_teach():
    batch = batch_of([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, torch.nan], groups=[0, 0, 1, 1, 2, 2, 2])
    result = build_baseline("dr_grpo", alpha=True).advantages(batch)
    assert result.values.tolist() == pytest.approx([1.5, -1.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert result.metrics["alpha"] == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_rewards_are_clipped_before_all_else(name):
    batch = ragged_batch(1, smallest=2)
    batch = replace(batch, rewards=30.0 * batch.rewards - 15.0)
    found = build_baseline(name, reward_clip=(-10, 10)).advantages(batch)
    expected = build_baseline(name).advantages(replace(batch, rewards=batch.rewards.clamp(-10, 10)))
    torch.testing.assert_close((found.values, found.baseline), (expected.values, expected.baseline))


def test_the_tables_value_alone():
    table = table_of_counts()
    batch = ragged_batch(3, smallest=1)
    static = build_baseline("basis", values=table, weighting="none", calibration="none").advantages(batch)
    torch.testing.assert_close(static.baseline, (batch.group_ids.double() + 0.5) / 9)
    batch = replace(batch, rewards=torch.where(batch.group_ids > 2, 1.0, batch.rewards))  # the policy has improved
    static = build_baseline("basis", values=table, weighting="none", calibration="none").advantages(batch)
    tilted = build_baseline("basis", values=table, weighting="none").advantages(batch)
    scored = ~batch.rewards.isnan()
    errors = [((batch.rewards - each.baseline)[scored] ** 2).mean() for each in (tilted, static)]
    assert errors[0] < errors[1]  # beta was chosen for it
