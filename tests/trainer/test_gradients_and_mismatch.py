"""The stability metrics: the gradient's noise against gradients taken one by one, rollout mismatch, difficulties."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType

from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.correction import RatioAlarm, rollout_mismatch, rollout_weights
from basis_rl.trainer.faults import GradientMonitor
from tests.support.tiny import sums, tiny_trainer


def test_nothing_is_logged_of_one_micro_batch_or_without_log_probabilities_of_the_engine(tmp_path):
    trainer = tiny_trainer(tmp_path, log_gradient_variance=True)
    trainer.train()
    assert not any(key.startswith(("gradient/", "rollout/")) for row in trainer.state.log_history for key in row)
    assert rollout_weights({}) is None


def mismatched():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    ours = -torch.tensor([[1.0, 2.0, 0.5, 9.0], [0.3, 0.2, 9.0, 9.0], [1.0, 1.0, 2.0, 2.0]])
    theirs = ours + torch.tensor([[0.1, -0.2, 0.3, 5.0], [0.0, 0.1, 5.0, 5.0], [torch.nan, 0.0, 0.1, 0.2]])
    return {
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "old_per_token_logps": ours,
        "sampling_per_token_logps": theirs,
        "importance_sampling_ratio": torch.tensor([[0.8], [0.0], [1.1]]),
    }


def test_rollout_mismatch_by_hand():
    rows = [[-0.1, 0.2, -0.3], [0.0, -0.1], [0.0, -0.1, -0.2]]  # the token without a log-probability is left out
    flat = torch.tensor([d for row in rows for d in row], dtype=torch.float64)
    found = rollout_mismatch(Accelerator(cpu=True), mismatched())
    assert found["rollout/kl"] == pytest.approx(float((flat.exp() - 1 - flat).mean()), abs=1e-6)
    assert found["rollout/log_ppl_gap"] == pytest.approx(sum(abs(sum(r) / len(r)) for r in rows) / 3, abs=1e-6)
    whole = [math.exp(sum(row)) for row in rows]
    assert found["rollout/ess"] == pytest.approx(sum(whole) ** 2 / (3 * sum(w * w for w in whole)), abs=1e-6)
    assert found["rollout/masked"] == pytest.approx(1 / 3)
    assert rollout_weights(mismatched()).tolist() == [[pytest.approx(w)] * 4 for w in (0.8, 0.0, 1.1)]


def test_tool_output_is_no_part_of_the_mismatch():
    """As if it were padding, though the engine gives it a log-probability."""
    accelerator = Accelerator(cpu=True)
    tool_mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]])
    plain = mismatched()
    expected = rollout_mismatch(accelerator, {**plain, "completion_mask": plain["completion_mask"] * tool_mask})
    found = rollout_mismatch(accelerator, {**plain, "tool_mask": tool_mask})
    other = rollout_mismatch(accelerator, plain)
    assert found == expected
    assert all(found[key] != other[key] for key in ("rollout/kl", "rollout/log_ppl_gap"))


@pytest.mark.parametrize("distance", [3.0, 3e4])
def test_few_rollouts_that_outweigh_all_others_are_warned_of(distance, caplog):
    plain = mismatched()
    far = plain["old_per_token_logps"].repeat(20, 1)
    far[0, 0] += distance
    many = {name: value.repeat(20, 1) for name, value in plain.items()} | {"old_per_token_logps": far}
    alarm = RatioAlarm()
    for batch, expected in ((plain, 0), (many, 1), (many, 1)):
        share = rollout_mismatch(Accelerator(cpu=True), batch)["rollout/ess"]
        assert 0.0 < share <= 1.0
        alarm.check_sample_size(share)
        assert len(caplog.records) == (expected if distance > 10 else 0)


def test_a_rollout_with_some_weights_of_0_is_not_silenced():
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    found = rollout_mismatch(Accelerator(cpu=True), {**mismatched(), "importance_sampling_ratio": weights})
    assert found["rollout/masked"] == pytest.approx(1 / 3)  # the second: padding aside


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.NO])
def test_sharded_or_scaled_gradients_are_refused(kind):
    accelerator = SimpleNamespace(distributed_type=kind)
    with pytest.raises(ValueError, match="log_gradient_variance does not work with"):
        GradientMonitor(torch.nn.Linear(1, 1), accelerator, fp16=kind == DistributedType.NO)


def test_rewards_are_told_apart_by_difficulty(tmp_path):
    dataset = sums().add_column("level", [i % 2 + 1 for i in range(16)])

    class Kept(BasisTrainer):
        def _log_difficulty(self, inputs, rewards):
            super()._log_difficulty(inputs, rewards)
            for level in (1, 2):
                own = [float(r) for row, r in zip(inputs, rewards, strict=True) if row["level"] == level]
                if own:
                    assert self._metrics["train"][f"reward/level/{level}"][-1] == pytest.approx(sum(own) / len(own))

    trainer = tiny_trainer(tmp_path, cls=Kept, train_dataset=dataset, difficulty_column="level", max_steps=4)
    trainer.train()
    assert {"reward/level/1", "reward/level/2"} <= {key for row in trainer.state.log_history for key in row}
