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


def expected_gradient(baseline, groups, chances):
    """Over all outcomes of rollouts with these chances of 1, in these groups; divided by the true gradient."""
    size, p = len(groups), torch.tensor(chances, dtype=torch.float64)
    total = 0.0
    for arms in itertools.product([0.0, 1.0], repeat=size):
        reward = torch.tensor(arms)
        batch = RolloutBatch(
            rewards=reward,
            group_ids=torch.tensor(groups),
            prompt_ids=[f"p{g}" for g in groups],
            action_mask=torch.ones((size, 1), dtype=torch.bool),
            energies=torch.ones((size, 1)),
            greedy_rewards=torch.zeros(size),
        )
        values = baseline.advantages(batch).values.reshape(size)
        total += float(torch.where(reward == 1, p, 1 - p).prod() * (values * (reward - p)).sum())
    return total / float((p * (1 - p)).sum())


def of_one_group(baseline, size):
    return expected_gradient(baseline, [0] * size, [P] * size)


class OneBeta(Basis):
    """BASIS with nothing to calibrate: what is left is the claim that the own reward is excluded."""

    def __init__(self):
        super().__init__(ValueTable.from_rewards({"p0": [0.0, 1.0, 1.0]}))
        self.betas = torch.tensor([1.0], dtype=torch.float64)


ALL = ["none", "rloo", "remax"]
SHRUNK = ["batch_mean", "dr_grpo", "opo", "ogb", "otb", "isolated_energy"]


@pytest.mark.parametrize("group", [2, 3, 5])
@pytest.mark.parametrize("name", ALL)
def test_leave_one_out_gives_all_of_the_gradient(name, group):
    assert of_one_group(build_baseline(name), group) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("group", [2, 3, 5])
@pytest.mark.parametrize("name", SHRUNK)
def test_a_mean_with_the_own_reward_gives_g_minus_1_of_g(name, group):
    assert of_one_group(build_baseline(name), group) == pytest.approx((group - 1) / group, abs=1e-9)


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("make", [OneBeta, BasisHistory, lambda: BasisHistory(OneBeta().values)])
def test_basis_gives_all_of_the_gradient(make, group):
    assert of_one_group(make(), group) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    "make", [lambda: build_baseline("james_stein"), lambda: build_baseline("spo", normalize=False)]
)
def test_other_groups_and_trackers_give_all_of_the_gradient(make):
    assert not make().uses_own_reward
    assert expected_gradient(make(), [0, 0, 1, 1, 1], [P] * 5) == pytest.approx(1.0, abs=1e-9)


def test_what_is_said_of_the_own_reward_is_what_the_enumeration_finds():
    # Those that divide by a standard deviation are in another unit and have no such factor; their centers are above.
    for name in [*ALL, *SHRUNK]:
        biased = abs(of_one_group(build_baseline(name), 3) - 1.0) > 1e-9
        assert BASELINES[name].uses_own_reward == biased, name


def test_calibrating_beta_lets_little_of_the_own_reward_in():
    # Beta is chosen by all rewards, the own one among them: a bias that shrinks with the batch. Six prompts here.
    chances = [0.1, 0.25, 0.4, 0.6, 0.75, 0.9]
    table = ValueTable.from_rewards(
        {f"p{i}": [1.0] * round(20 * p) + [0.0] * round(20 - 20 * p) for i, p in enumerate(chances)}
    )
    share = expected_gradient(Basis(table), list(range(len(chances))), chances)
    assert share != pytest.approx(1.0, abs=1e-6)
    assert 0.85 < share < 1.15
