"""Energies and alignment by action."""

import pytest
import torch

from basis_rl.functional.energy import align, logit_gradient_energy, unalign, weighted_baseline
from basis_rl.functional.gae import reward_to_go


def test_energy_is_the_squared_logit_gradient():
    logits = torch.randn((6, 9), dtype=torch.float64, requires_grad=True)
    chosen = torch.arange(6)
    log_probs = logits.log_softmax(-1)[torch.arange(6), chosen]
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    probs = logits.detach().softmax(-1)
    energy = logit_gradient_energy(log_probs.detach(), (probs**2).sum(-1))
    torch.testing.assert_close(energy, (gradient**2).sum(-1))
    assert (energy <= 2).all()


def test_a_certain_token_has_no_energy():
    assert logit_gradient_energy(torch.tensor([0.0]), torch.tensor([1.0 - 1e-7])).item() == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_alignment_counts_actions_and_comes_back(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand((7, 10), generator=generator) < 0.6
    mask[3] = False
    values = torch.rand((7, 10), generator=generator)
    aligned = align(values, mask)
    assert aligned.shape[1] == int(mask.sum(1).max())
    for i in range(7):
        taken = values[i][mask[i]].tolist()
        assert aligned[i].tolist() == taken + [0.0] * (aligned.shape[1] - len(taken))
    torch.testing.assert_close(unalign(aligned, mask), values * mask)


@pytest.mark.parametrize("tail", ["zero", "last"])
def test_where_nobody_of_the_group_is_alive_the_baseline_is_0(tail):
    returns, groups = torch.ones(4, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    alive = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    baseline, lonely = weighted_baseline(returns, torch.ones_like(returns), alive, groups, tail)
    assert baseline.tolist() == [[1.0, 0.0, 0.0]] * 2 + [[1.0, 1.0, 1.0]] * 2
    assert lonely.tolist() == [[False] * 3] * 2 + [[False, False, True], [False] * 3]


def test_reward_to_go_passes_over_tool_output():
    mask = torch.tensor([[True, False, True, True]])
    kl = torch.tensor([[0.1, 9.0, 0.2, 0.3]])
    result = reward_to_go(torch.tensor([1.0]), kl, mask)[0]
    assert result.tolist() == pytest.approx([0.4, 0.5, 0.5, 0.7])
    assert reward_to_go(torch.tensor([1.0]), None, mask)[0].tolist() == [1.0] * 4
