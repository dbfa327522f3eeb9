"""One reward, with what it remembers, for each file of tests."""

import pytest

from basis_rl.rewards import MathVerifyReward


@pytest.fixture(scope="module")
def reward():
    reward = MathVerifyReward(num_workers=2, timeout=3.0)
    yield reward
    reward.close()
