"""The adapter for SkyRL, called as SkyRL calls it. `test_real_skyrl.py` calls SkyRL itself."""

from types import SimpleNamespace

import torch

from basis_rl.adapters.skyrl import SkyRLEstimator
from basis_rl.baselines import BasisHistory
from tests.adapters.test_adapted_baselines import by_itself, drawn
from tests.adapters.test_verl import given

CONFIG = SimpleNamespace(use_kl_in_reward=False)


def test_a_belief_goes_by_the_uids_and_padding_teaches_nothing():
    batches = [drawn(seed) for seed in range(4)]
    estimator = SkyRLEstimator("basis_history", "SkyRL")
    for (rewards, mask, _, ids), expected in zip(batches, by_itself(BasisHistory(), batches), strict=True):
        # As SkyRL pads: copies of the first row.
        padded = torch.tensor([*range(len(ids)), 0, 0])
        scores = given(rewards, mask)[padded]
        advantages, returns = estimator(
            token_level_rewards=scores, response_mask=mask[padded].float(), index=[*ids, "pad0", "pad1"],
            values=None, grpo_norm_by_std=True, gamma=1.0, lambd=1.0, config=CONFIG,
        )  # fmt: skip
        torch.testing.assert_close(advantages[:-2], expected.float())
        assert not advantages[-2:].any()
        assert torch.equal(returns, (rewards[:, None] * mask)[padded])


def test_a_prompt_whose_own_name_begins_like_padding_is_none():
    rewards, mask, _, ids = drawn(0)
    named, as_it_is = (
        SkyRLEstimator("basis_history", "SkyRL")(given(rewards, mask), mask.float(), index, CONFIG)[0]
        for index in ([f"padlock {each}" for each in ids], ids)
    )
    assert as_it_is.any()
    assert torch.equal(named, as_it_is)
