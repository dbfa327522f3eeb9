"""The adapter for verl, called as verl calls it. `test_real_verl.py` calls verl itself."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from basis_rl.adapters import skyrl, verl
from basis_rl.adapters.skyrl import SkyRLEstimator
from basis_rl.adapters.verl import VerlEstimator
from basis_rl.baselines import BasisHistory, build_baseline
from tests.adapters.test_adapted_baselines import by_itself, drawn


class Manager:
    """Stands for verl's agent loop manager."""

    def generate_sequences(self, prompts):
        return "what the manager returns"


def given(rewards, mask):
    """Rewards as verl has them, with numbers where no token is."""
    last = mask.long().cumsum(dim=1).argmax(dim=1, keepdim=True)
    return torch.zeros(mask.shape).scatter(1, last, rewards[:, None])


def batches_of(estimator, batches):
    """The advantages of batches whose rows have a new ``uid`` each time."""
    manager = estimator.manager(Manager)()
    for step, (rewards, mask, groups, ids) in enumerate(batches):
        uids = np.array([f"{step} {group}" for group in groups], dtype=object)
        columns = {"uid": uids, "prompt_id": np.array(ids, dtype=object)}
        # The first batch as a TensorDict has it, which is a mapping; the others as a DataProto.
        prompts = SimpleNamespace(non_tensor_batch=columns) if step else columns
        assert manager.generate_sequences(prompts) == "what the manager returns"
        advantages, returns = estimator(
            token_level_rewards=given(rewards, mask), response_mask=mask.long(), index=uids,
            config=SimpleNamespace(use_kl_in_reward=False), reward_baselines=None,
        )  # fmt: skip
        assert torch.equal(returns, rewards[:, None] * mask)
        yield advantages


def test_a_belief_knows_its_prompts_by_other_uids():
    batches = [drawn(seed) for seed in range(4)]
    expected = by_itself(BasisHistory(), batches)
    estimator = VerlEstimator("basis_history")
    for found, values in zip(batches_of(estimator, batches), expected, strict=True):
        torch.testing.assert_close(found, values.float())
    assert not estimator.prompts


def test_a_belief_without_prompts_is_an_error_and_a_group_mean_is_none():
    rewards, mask, groups, _ = drawn(0)
    arguments = {"token_level_rewards": given(rewards, mask), "response_mask": mask, "index": np.array(groups)}
    with pytest.raises(ValueError, match=r"'spo' needs to know the prompts: .*agent_loop_manager_class"):
        VerlEstimator("spo")(**arguments)
    [expected] = by_itself(build_baseline("rloo"), [(rewards, mask, groups, groups)])
    torch.testing.assert_close(VerlEstimator("rloo")(**arguments)[0], expected.float())


def test_a_dataset_without_ids_is_refused():
    manager = VerlEstimator("spo").manager(Manager, column="problem_id")()
    with pytest.raises(ValueError, match="no column 'problem_id'"):
        manager.generate_sequences({"uid": ["a"], "prompt_id": ["b"]})


@pytest.mark.parametrize("kind", [VerlEstimator, lambda baseline: SkyRLEstimator(baseline, "SkyRL")])
def test_kl_in_the_reward_is_refused(kind):
    rewards, mask, groups, _ = drawn(0)
    with pytest.raises(ValueError, match="use_kl_in_reward"):
        kind("rloo")(given(rewards, mask), mask, groups, SimpleNamespace(use_kl_in_reward=True))


@pytest.mark.parametrize(
    ("adapter", "path", "function"),
    [
        (verl, "verl.trainer.ppo.core_algos", "register_adv_est"),
        (skyrl, "skyrl.backends.skyrl_train.utils.ppo_utils", "register_advantage_estimator"),
    ],
)
def test_it_is_registered_by_name(adapter, path, function, monkeypatch):
    known = {}
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    setattr(sys.modules[path], function, lambda name: lambda made: known.setdefault(name, made))
    assert known == {"ours": adapter.register("ours", "rloo")}
