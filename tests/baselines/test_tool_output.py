"""Tool output between a rollout's tokens changes no token's advantage, for any baseline: only actions count."""

from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import BASELINES
from basis_rl.conformance.baselines import example_batch
from basis_rl.types import SIGNALS
from tests.support.tiny import named_baseline, sums

READS_KL = [name for name, cls in BASELINES.items() if cls.reads_kl]


def batch_of_actions(baseline, seed, with_kl):
    """Ragged groups of rollouts of 1 to 7 actions, with all that the baseline requires; some rewards are missing."""
    batch = example_batch(baseline, sums()["prompt_id"][:8], seed=seed)
    kl = torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    return replace(batch, kl=kl * batch.action_mask if with_kl else None)


def with_tool_output(batch, seed, garbage):
    """The same rollouts with stretches of tool output anywhere, also before the first action and after the last one."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros((len(batch.rewards), 30), dtype=torch.bool)
    for row, actions in zip(mask, batch.action_mask.sum(dim=1).tolist(), strict=True):
        row[torch.randperm(30, generator=generator)[:actions]] = True
    fields = {}
    for name in (name for name, shape in SIGNALS.items() if shape == "NT"):
        if getattr(batch, name) is not None:
            fields[name] = torch.full(mask.shape, garbage)
            fields[name][mask] = getattr(batch, name)[batch.action_mask]
    return replace(batch, action_mask=mask, **fields)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "with_kl"), [*((name, False) for name in BASELINES), *((name, True) for name in READS_KL)]
)
def test_advantages_of_actions_do_not_see_tool_output(name, with_kl, seed):
    batch = batch_of_actions(named_baseline(name, sums()), seed, with_kl)
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
