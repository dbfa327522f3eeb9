"""Energies, and the baselines that they weigh; `test_gae.py` has the alignment by action."""

import pytest
import torch

from basis_rl.functional.energy import logit_gradient_energy, weighted_baseline


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


@pytest.mark.parametrize("tail", ["zero", "last"])
def test_where_nobody_of_the_group_is_alive_the_baseline_is_0(tail):
    returns, groups = torch.ones(4, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    alive = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    baseline, lonely = weighted_baseline(returns, torch.ones_like(returns), alive, groups, tail)
    assert baseline.tolist() == [[1.0, 0.0, 0.0]] * 2 + [[1.0, 1.0, 1.0]] * 2
    assert lonely.tolist() == [[False] * 3] * 2 + [[False, False, True], [False] * 3]
