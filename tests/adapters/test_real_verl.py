"""verl itself asks our baselines; skipped where verl cannot be imported (docs/adapters.md has the command)."""

import asyncio

import numpy as np
import pytest
import torch

from basis_rl.adapters.verl import register
from basis_rl.baselines import BasisHistory
from tests.adapters.test_adapted_baselines import by_itself, drawn
from tests.adapters.test_verl import given

ray_trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer", reason="needs verl", exc_type=ImportError)
agent_loop = pytest.importorskip("verl.experimental.agent_loop")
v1 = pytest.importorskip("verl.trainer.ppo.v1", exc_type=ImportError)
tensordicts = pytest.importorskip("verl.utils.tensordict_utils")
AlgoConfig = pytest.importorskip("verl.trainer.config").AlgoConfig
compute_v1 = pytest.importorskip("verl.trainer.ppo.v1.utils").compute_advantage_for_multi_trajectories


def batch_of(rewards, mask, uids):
    tensors = {"token_level_rewards": given(rewards, mask), "response_mask": mask.long()}
    return ray_trainer.DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


@pytest.mark.parametrize("name", ["rloo", "opo", "grpo_vectorized"])
def test_our_group_means_are_verls_own_in_its_own_function(name):
    rewards, mask, groups, _ = drawn(3)
    uids = np.array(groups, dtype=object)
    register(f"our_{name}", name.removesuffix("_vectorized"))
    ours, theirs = (
        ray_trainer.compute_advantage(batch_of(rewards, mask, uids), each, config=AlgoConfig()).batch["advantages"]
        for each in (f"our_{name}", name)
    )
    torch.testing.assert_close(ours, theirs * mask, rtol=1e-3, atol=1e-4)


class Worker:
    """Answers a chunk of prompts at once, where Ray's would generate."""

    def __init__(self):
        self.generate_sequences = self

    def remote(self, chunk):
        return answer(chunk)


async def answer(chunk):
    if not isinstance(chunk, ray_trainer.DataProto):
        return None
    responses = torch.zeros(len(chunk), 2)
    output = {"prompts": responses, "responses": responses, "attention_mask": torch.ones(len(chunk), 4)}
    timing = dict.fromkeys(("generate_sequences", "tool_calls", "compute_score", "num_preempted"), 0.0)
    return ray_trainer.DataProto.from_dict(tensors=output, meta_info={"metrics": [timing] * len(chunk)})


@pytest.mark.parametrize("trainer", ["legacy", "v1"])
def test_a_belief_passes_verls_managers_and_its_advantages(trainer, monkeypatch):
    monkeypatch.setattr("ray.get", lambda answers: [asyncio.run(each) for each in answers])
    estimator = register(f"belief of {trainer}", BasisHistory())
    base = v1.AgentLoopManagerTQ if trainer == "v1" else agent_loop.AgentLoopManager
    manager = object.__new__(estimator.manager(base))
    manager.agent_loop_workers = [Worker(), Worker()]
    batches = [drawn(seed) for seed in range(3)]
    for step, expected in enumerate(by_itself(BasisHistory(), batches)):
        rewards, mask, groups, ids = batches[step]
        uids = np.array([f"{step}-{group}" for group in groups], dtype=object)
        columns = {"uid": uids, "prompt_id": np.array(ids, dtype=object)}
        tensors = {"dummy_tensor": torch.zeros(len(uids), 1)}
        data = batch_of(rewards, mask, uids)
        options = {"adv_estimator": f"belief of {trainer}", "config": AlgoConfig()}
        if trainer == "legacy":
            manager.generate_sequences(ray_trainer.DataProto.from_dict(tensors=tensors, non_tensors=columns))
            found = ray_trainer.compute_advantage(data, **options)
        else:
            manager.generate_sequences(tensordicts.get_tensordict({**columns, **tensors}))
            found = compute_v1(data, batch_keys=[f"{uid}_{row}_0" for row, uid in enumerate(uids)], **options)
        torch.testing.assert_close(found.batch["advantages"], expected.float())
