"""The exact bias of each baseline: a two-armed bandit, every outcome enumerated.

Arm a pays ``a`` and is chosen with probability ``p`` (a = 1) or ``1 - p``, by one logit x. The true gradient of the
expected reward is ``p (1 - p)``; a batch's estimate is the mean of ``A_i d log pi(a_i) / dx``, ``a_i - p``.
"""

import itertools

import pytest
import torch

from basis_rl.baselines import BASELINES, Basis, BasisHistory, build_baseline
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable

P = 0.3


def expected_gradient(baseline, group):
    """Over all ``2^group`` outcomes of one group; divided by the true gradient."""
    total = 0.0
    for arms in itertools.product([0.0, 1.0], repeat=group):
        probability = 1.0
        for arm in arms:
            probability *= P if arm else 1 - P
        batch = RolloutBatch(
            rewards=torch.tensor(arms),
            group_ids=torch.zeros(group, dtype=torch.long),
            prompt_ids=["a"] * group,
            action_mask=torch.ones((group, 1), dtype=torch.bool),
            energies=torch.ones((group, 1)),
            greedy_rewards=torch.zeros(group),
        )
        values = baseline.advantages(batch).values.reshape(group)
        scores = torch.tensor(arms, dtype=torch.float64) - P
        total += probability * float((values * scores).mean())
    return total / (P * (1 - P))


class OneBeta(Basis):
    """BASIS with nothing to calibrate: what is left is the claim that the own reward is excluded."""

    def __init__(self):
        super().__init__(ValueTable.from_rewards({"a": [0.0, 1.0, 1.0]}))
        self.betas = torch.tensor([1.0], dtype=torch.float64)


ALL = ["none", "rloo", "remax"]
SHRUNK = ["batch_mean", "dr_grpo", "opo", "ogb", "otb", "isolated_energy"]


@pytest.mark.parametrize("group", [2, 3, 5])
@pytest.mark.parametrize("name", ALL)
def test_leave_one_out_gives_all_of_the_gradient(name, group):
    assert expected_gradient(build_baseline(name), group) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("group", [2, 3, 5])
@pytest.mark.parametrize("name", SHRUNK)
def test_a_mean_with_the_own_reward_gives_g_minus_1_of_g(name, group):
    assert expected_gradient(build_baseline(name), group) == pytest.approx((group - 1) / group, abs=1e-9)


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("make", [OneBeta, BasisHistory, lambda: BasisHistory(OneBeta().values)])
def test_basis_gives_all_of_the_gradient(make, group):
    assert expected_gradient(make(), group) == pytest.approx(1.0, abs=1e-9)


def test_what_is_said_of_the_own_reward_is_what_the_enumeration_finds():
    # Those that divide by a standard deviation are in another unit and have no such factor; their centers are above.
    for name in [*ALL, *SHRUNK]:
        biased = abs(expected_gradient(build_baseline(name), 3) - 1.0) > 1e-9
        assert BASELINES[name].uses_own_reward == biased, name


def test_calibrating_beta_lets_little_of_the_own_reward_in():
    # Beta is chosen by all rewards, the own one among them: a bias that shrinks with the batch. Six prompts here.
    chances = [0.1, 0.25, 0.4, 0.6, 0.75, 0.9]
    ids = [f"p{i}" for i in range(len(chances))]
    table = ValueTable.from_rewards(
        {i: [1.0] * round(20 * p) + [0.0] * round(20 - 20 * p) for i, p in zip(ids, chances, strict=True)}
    )
    total = 0.0
    for arms in itertools.product([0.0, 1.0], repeat=len(ids)):
        probability = 1.0
        for arm, p in zip(arms, chances, strict=True):
            probability *= p if arm else 1 - p
        batch = RolloutBatch(
            rewards=torch.tensor(arms),
            group_ids=torch.arange(len(ids)),
            prompt_ids=ids,
            action_mask=torch.ones((len(ids), 1), dtype=torch.bool),
        )
        values = Basis(table).advantages(batch).values
        total += probability * float((values * (torch.tensor(arms) - torch.tensor(chances))).sum())
    share = total / sum(p * (1 - p) for p in chances)
    assert share != pytest.approx(1.0, abs=1e-6)
    assert 0.85 < share < 1.15
