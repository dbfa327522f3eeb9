"""Tool output between a rollout's tokens changes no token's advantage, for any baseline: only actions count."""

from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import BASELINES
from basis_rl.functional.returns import reward_to_go
from basis_rl.types import RolloutBatch
from tests.support.tiny import named_baseline, sums

READS_KL = [name for name, cls in BASELINES.items() if cls.reads_kl]


def batch_of_actions(seed, with_kl):
    """Twelve rollouts of 1 to 6 actions, all optional fields there, one reward missing."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (12,), generator=generator)
    mask = torch.arange(6) < lengths[:, None]
    rewards = torch.randint(0, 2, (12,), generator=generator).float()
    rewards[5] = torch.nan
    names = sums()["prompt_id"]
    return RolloutBatch(
        rewards=rewards,
        group_ids=torch.arange(12) // 4,
        prompt_ids=[names[i // 4] for i in range(12)],
        action_mask=mask,
        energies=torch.rand((12, 6), generator=generator) * mask,
        kl=torch.randn((12, 6), generator=generator) * 0.1 * mask if with_kl else None,
        rollout_weights=torch.rand((12, 6), generator=generator) * mask,
        values=torch.rand((12, 6), generator=generator) * mask,
        log_probs=-torch.rand((12, 6), generator=generator) * mask,
        reward_parts=torch.stack([rewards, rewards + torch.arange(12) % 3], dim=1),
        reward_weights=torch.tensor([1.0, 0.0]),
        greedy_rewards=torch.rand((12,), generator=generator),
        prompt_texts=[f"question {i // 4}" for i in range(12)],
        step=0,
    )


def with_tool_output(batch, seed, garbage):
    """The same rollouts with stretches of tool output anywhere, also before the first action and after the last one."""
    generator = torch.Generator().manual_seed(seed)
    width = 30
    places = [torch.randperm(width, generator=generator)[: int(row.sum())].sort().values for row in batch.action_mask]
    mask = torch.zeros((12, width), dtype=torch.bool)
    for row, columns in enumerate(places):
        mask[row, columns] = True

    def spread(values):
        if values is None:
            return None
        wide = torch.full((12, width), garbage)
        wide[mask] = values[batch.action_mask]
        return wide

    fields = {
        name: spread(getattr(batch, name)) for name in ("energies", "kl", "rollout_weights", "values", "log_probs")
    }
    return replace(batch, action_mask=mask, **fields)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "with_kl"), [*((name, False) for name in BASELINES), *((name, True) for name in READS_KL)]
)
def test_advantages_of_actions_do_not_see_tool_output(name, with_kl, seed):
    batch = batch_of_actions(seed, with_kl)
    # The trainer hands over 0 where there is no action; even what is not 0 there must not count.
    for garbage in (0.0, 7.0):
        wide = with_tool_output(batch, seed + 100, garbage)
        expected, found = (named_baseline(name, sums()).advantages(each) for each in (batch, wide))
        for a, b in ((expected.values, found.values), (expected.baseline, found.baseline)):
            if a.ndim == 1:
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
                continue
            torch.testing.assert_close(b[wide.action_mask], a[batch.action_mask], rtol=1e-12, atol=1e-12)
        if found.values.ndim == 2:
            assert (found.values[~wide.action_mask] == 0).all()
        assert (expected.values != 0).any()


@pytest.mark.parametrize("seed", range(2))
def test_returns_pass_over_tool_output(seed):
    batch = batch_of_actions(seed, with_kl=True)
    wide = with_tool_output(batch, seed, 7.0)
    narrow_returns = reward_to_go(batch.rewards, batch.kl, batch.action_mask)[batch.action_mask]
    wide_returns = reward_to_go(wide.rewards, wide.kl, wide.action_mask)[wide.action_mask]
    torch.testing.assert_close(wide_returns, narrow_returns, rtol=1e-12, atol=1e-12, equal_nan=True)
