"""SkyRL itself asks our baselines; skipped where SkyRL cannot be imported (docs/adapters.md has the command)."""

import typing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typing_extensions

from basis_rl.adapters.skyrl import register
from basis_rl.baselines import BasisHistory
from tests.adapters.test_adapted_baselines import by_itself, drawn
from tests.adapters.test_verl import given

with pytest.MonkeyPatch.context() as patch:
    # pydantic refuses the other one before Python 3.12, and SkyRL gives it that one.
    patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    trainers = pytest.importorskip("skyrl.train.trainer", reason="needs SkyRL", exc_type=ImportError)
batches_of = pytest.importorskip("skyrl.backends.skyrl_train.training_batch")
registry = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils").AdvantageEstimatorRegistry
ray = pytest.importorskip("ray")


def advantages_of(name, rewards, mask, uids, pad=0, last_steps=None):
    """By the trainer's own method, with nothing of the trainer but what that reads."""
    algorithm = SimpleNamespace(
        advantage_estimator=name, use_kl_in_reward=False, gamma=1.0, lambd=1.0, grpo_norm_by_std=False
    )
    generator = SimpleNamespace(step_wise_trajectories=last_steps is not None)
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(generator=generator, trainer=SimpleNamespace(algorithm=algorithm)), all_metrics={}
    )
    tensors = {
        "rewards": given(rewards, mask),
        "response_mask": mask.float(),
        "loss_mask": mask.float(),
        "values": None,
    }
    batch = batches_of.TrainingInputBatch(tensors)
    batch.metadata = {"uids": list(uids), "avg_response_length": 1.0}
    if last_steps is not None:
        batch.metadata["is_last_step"] = last_steps
    batch = batches_of.pad_training_input_batch(batch, pad)
    return trainers.RayPPOTrainer.compute_advantages_and_returns(trainer, batch)["advantages"]


def test_our_group_means_are_skyrls_own_in_its_own_trainer():
    rewards, mask, _, ids = drawn(3)
    register("our_rloo", "rloo")
    register("our_dr_grpo", "dr_grpo")
    for ours, theirs in (("our_rloo", "rloo"), ("our_dr_grpo", "grpo")):
        found, expected = (advantages_of(name, rewards, mask, ids) for name in (ours, theirs))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("steps", [False, True])
def test_a_belief_goes_on_in_skyrls_own_trainer(steps):
    register(f"belief {steps}", BasisHistory())
    batches = [drawn(seed) for seed in range(3)]
    for (rewards, mask, _, ids), expected in zip(batches, by_itself(BasisHistory(), batches), strict=True):
        pad = 2 if steps else 0
        last = [True] * len(ids) if steps else None
        found = advantages_of(f"belief {steps}", rewards, mask, np.array(ids).tolist(), pad, last)
        torch.testing.assert_close(found[: len(ids)], expected.float())
        assert not found[len(ids) :].any()


@pytest.mark.long
def test_a_process_that_registered_nothing_gets_the_belief_by_ray():
    batches = [drawn(seed) for seed in range(2)]

    @ray.remote
    def trained():
        typing.TypedDict = typing_extensions.TypedDict
        from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry as there

        return [there.get("by ray")(given(*batch[:2]), batch[1], batch[3])[0] for batch in batches]

    ray.init(num_cpus=1, include_dashboard=False)
    try:
        register("by ray", BasisHistory())
        found = ray.get(trained.remote())
    finally:
        ray.shutdown()
    for each, expected in zip(found, by_itself(BasisHistory(), batches), strict=True):
        torch.testing.assert_close(each, expected.float())
