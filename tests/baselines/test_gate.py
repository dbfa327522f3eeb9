"""EVPO's gate against plain loops: when it is open, and what is subtracted while it is closed."""

import statistics
from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import build_baseline
from basis_rl.conformance.baselines import example_batch
from basis_rl.values import ValueTable

IDS = [f"prompt-{i}" for i in range(8)]
TABLE = ValueTable.from_rewards({p: [1.0] * i + [0.0] * (7 - i) for i, p in enumerate(IDS)})
GATED = [("ppo", {}), ("ppo", {"lam": 0.5, "whiten_advantages": False}), ("sao", {})]
GATED += [("spo", {"normalize": False, "fixed_range": [0.0, 1.0]}), ("basis", {"values": TABLE})]
GATED += [("basis_history", {}), ("basis_history", {"target": "optimal_token"})]


def batch_of(baseline, seed, solved=None):
    """A batch; with `solved`, the prompts with these places are solved and the others are not."""
    batch = replace(example_batch(baseline, IDS, seed=seed, step=seed, unscored=seed % 2 == 0), turn_rewards=None)
    if solved is None:
        return batch
    right = torch.tensor([float(int(name.rpartition("-")[2]) in solved) for name in batch.prompt_ids])
    known = replace(batch, rewards=torch.where(batch.rewards.isnan(), torch.nan, right))
    if batch.values is None:
        return known
    # What a critic that knows the prompts says.
    return replace(known, values=(0.2 + 0.6 * right)[:, None] * batch.action_mask)


def others(rewards):
    """Of each rollout the mean reward of the others that have one."""
    found = []
    for own in range(len(rewards)):
        rest = [r for place, r in enumerate(rewards) if place != own and r == r]
        found.append(statistics.fmean(rest) if rest else 0.0)
    return found


@pytest.mark.parametrize(("name", "kwargs"), GATED)
def test_a_closed_gate_leaves_the_mean_of_the_others(name, kwargs):
    baseline = build_baseline(name, **kwargs, ev_gate=True)
    batch = batch_of(baseline, 1)
    found = baseline.advantages(batch)
    assert found.metrics["gate"] == 0.0
    means = others(batch.rewards.tolist())
    counts = batch.action_mask & ~batch.rewards.isnan()[:, None]
    away = torch.zeros(counts.shape, dtype=torch.float64)
    for row, token in counts.nonzero().tolist():
        away[row, token] = float(batch.rewards[row]) - means[row]
    if getattr(baseline, "whiten_advantages", False):
        values = [float(each) for each in away[counts]]
        away = torch.where(counts, (away - statistics.fmean(values)) / (statistics.pstdev(values) + 1e-8), 0.0)
    values = found.values if found.values.ndim == 2 else found.values[:, None] * counts
    torch.testing.assert_close(values, away)


def test_critic_in_a_closed_gate_gives_turns_their_own_rewards():
    baseline = build_baseline("ppo", lam=0.5, whiten_advantages=False, ev_gate=True)
    batch = batch_of(baseline, 1)
    row = int((batch.action_mask.sum(dim=1) > 2).nonzero()[0])
    first = torch.zeros_like(batch.values)
    first[row, 0] = 0.25
    found = baseline.advantages(replace(batch, turn_rewards=first)).values[row]
    mean = others(batch.rewards.tolist())[row]
    assert found[0].item() == pytest.approx(float(batch.rewards[row]) - mean)
    assert found[1].item() == pytest.approx(float(batch.rewards[row]) - 0.25 - mean)


@pytest.mark.parametrize(("name", "kwargs"), GATED)
def test_the_gate_is_open_while_earlier_batches_were_explained(name, kwargs):
    """The state decides, not the batch; it is that of a loop over what the baseline says before it learns."""
    baseline = build_baseline(name, **kwargs, ev_gate=True)
    plain = build_baseline(name, **kwargs)
    unexplained = total = 0.0
    opened = []
    easy = {4, 5, 6, 7}
    for step in range(8):
        # The second half turns everything around: what was learnt misleads.
        batch = batch_of(baseline, step, easy if step < 4 else {0, 1, 2, 3})
        if step >= 4 and batch.values is not None:
            batch = replace(batch, values=(1.0 - batch.values) * batch.action_mask)
        found = baseline.advantages(batch)
        opened.append(found.metrics["gate"])
        assert opened[-1] == float(baseline.gate.is_open)
        if opened[-1] and "normalize" not in kwargs:
            torch.testing.assert_close(found.values, plain.advantages(batch).values)
        if kwargs.get("target") != "optimal_token" and name in ("ppo", "sao", "basis", "spo"):
            said = plain.advantages(batch).baseline
            counts = batch.action_mask & ~batch.rewards.isnan()[:, None]
            if said.ndim == 1:
                said, counts = said[:, None], ~batch.rewards.isnan()[:, None]
            pairs = [(float(batch.rewards[row]), float(said[row, token])) for row, token in counts.nonzero().tolist()]
            if len(pairs) > 1:
                unexplained = 0.9 * unexplained + statistics.pvariance([r - b for r, b in pairs])
                total = 0.9 * total + statistics.pvariance([r for r, _ in pairs])
        baseline.update(batch)
        plain.update(batch)
        if total:
            assert baseline.gate.variances == pytest.approx((unexplained, total))
    assert opened[0] == 0.0
    assert 1.0 in opened[1:6], "it was explained"
    if name in ("ppo", "sao"):
        assert 0.0 in [*opened[5:], float(baseline.gate.is_open)], "it misleads"
    again = build_baseline(name, **kwargs, ev_gate=True)
    again.load_state_dict(baseline.state_dict())
    assert again.gate.variances == baseline.gate.variances
    last = batch_of(baseline, 9, easy)
    torch.testing.assert_close(again.advantages(last).values, baseline.advantages(last).values)
