"""The exact bias of each baseline: a two-armed bandit, every outcome enumerated.

Arm a pays ``a`` and is chosen with probability ``p`` (a = 1) or ``1 - p``, by one logit x. The true gradient of the
expected reward is ``p (1 - p)``; a batch's estimate is the mean of ``A_i d log pi(a_i) / dx``, ``a_i - p``.
"""

import itertools
from functools import partial

import pytest
import torch

from basis_rl.baselines import BASELINES, Basis, BasisHistory, build_baseline
from basis_rl.values import ValueTable
from tests.support.batches import batch_of

P = 0.3


def expected_gradient(baseline, groups, chances):
    """Over all outcomes of rollouts with these chances of 1, in these groups; divided by the true gradient."""
    size, p = len(groups), torch.tensor(chances, dtype=torch.float64)
    total = 0.0
    for arms in itertools.product([0.0, 1.0], repeat=size):
        reward = torch.tensor(arms)
        mask = torch.ones((size, 1), dtype=torch.bool)
        batch = batch_of(reward, groups=groups, action_mask=mask, energies=mask.float(), greedy_rewards=0 * reward)
        values = baseline.advantages(batch).values.reshape(size)
        total += float(torch.where(reward == 1, p, 1 - p).prod() * (values * (reward - p)).sum())
    return total / float((p * (1 - p)).sum())


def of_one_group(baseline, size):
    return expected_gradient(baseline, [0] * size, [P] * size)


class OneBeta(Basis):
    """BASIS with nothing to calibrate: what is left is the claim that the own reward is excluded."""

    def __init__(self):
        super().__init__(ValueTable.from_rewards({"p0": [0.0, 1.0, 1.0], "p1": [0.0, 1.0]}))
        self.uses_own_reward = False
        self.betas = torch.tensor([1.0], dtype=torch.float64)


# Those that divide by a standard deviation are in another unit and have no such factor; their centers are here.
@pytest.mark.parametrize("group", [2, 3, 5])
@pytest.mark.parametrize(
    "name", ["none", "rloo", "remax", "batch_mean", "dr_grpo", "opo", "ogb", "otb", "isolated_energy"]
)
def test_a_mean_with_the_own_reward_gives_g_minus_1_of_g(name, group):
    share = (group - 1) / group if BASELINES[name].uses_own_reward else 1.0
    assert of_one_group(build_baseline(name), group) == pytest.approx(share, abs=1e-9)


JAMES_STEIN, SPO = partial(build_baseline, "james_stein"), partial(build_baseline, "spo", normalize=False)
OF_PROMPTS = [
    OneBeta,
    lambda: Basis(OneBeta().values, calibration="none"),
    BasisHistory,
    lambda: BasisHistory(OneBeta().values),
    SPO,
]


@pytest.mark.parametrize(
    ("make", "groups"), [*itertools.product(OF_PROMPTS, [[0], [0, 0], [0, 0, 1, 1, 1]]), (JAMES_STEIN, [0, 0, 1, 1, 1])]
)
def test_other_prompts_and_what_was_learnt_give_all_of_the_gradient(make, groups):
    assert not make().uses_own_reward
    assert expected_gradient(make(), groups, [P] * len(groups)) == pytest.approx(1.0, abs=1e-9)


def test_calibrating_beta_lets_little_of_the_own_reward_in():
    # Beta is chosen by all rewards, the own one among them: a bias that shrinks with the batch. Six prompts here.
    counts = [2, 5, 8, 12, 15, 18]
    table = ValueTable.from_rewards({f"p{i}": [1.0] * k + [0.0] * (20 - k) for i, k in enumerate(counts)})
    share = expected_gradient(Basis(table), list(range(6)), [k / 20 for k in counts])
    assert share != pytest.approx(1.0, abs=1e-6)
    assert 0.85 < share < 1.15
