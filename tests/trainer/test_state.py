"""The baseline's life: update after the policy update, state in checkpoints, strict loading."""

import pytest
import torch

from basis_rl.baselines import CenterScale, Rloo, check_state_keys
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.state import FILE_NAME
from tests.support.tiny import config, parity_reward, sums, tiny_model, tiny_tokenizer


class RunningMean(CenterScale):
    """The mean of all rewards of earlier batches: state that must survive a resume to the bit."""

    def __init__(self, log=None):
        self.total, self.count, self.log = 0.0, 0, log if log is not None else []

    def center(self, rewards, group_ids):
        return torch.full_like(rewards, self.total / max(1, self.count))

    def advantages(self, batch):
        self.log.append(("advantages", batch.step, self.total, self.count))
        return super().advantages(batch)

    def update(self, batch):
        self.log.append(("update", batch.step))
        self.total += float(batch.rewards.nansum())
        self.count += int((~batch.rewards.isnan()).sum())

    def state_dict(self):
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state):
        check_state_keys(self, state, ("total", "count"))
        self.total, self.count = state["total"], state["count"]


class Ordered(BasisTrainer):
    """Notes each optimizer step in the baseline's log."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.baseline.log.append(("backward",))
        return loss


def run(output_dir, baseline, resume=None, **settings):
    tokenizer = tiny_tokenizer()
    trainer = Ordered(
        model=tiny_model(tokenizer),
        reward_funcs=parity_reward,
        args=config(output_dir, **settings),
        train_dataset=sums(32),
        processing_class=tokenizer,
        baseline=baseline,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_update_comes_after_the_policy_update_once_a_batch(tmp_path):
    baseline = RunningMean()
    run(tmp_path, baseline, max_steps=4, num_iterations=1)
    order = [entry[:2] if entry[0] != "backward" else entry for entry in baseline.log]
    batch = [("advantages", 0), ("backward",), ("backward",), ("update", 0)]
    assert order == [*batch, ("advantages", 1), ("backward",), ("backward",), ("update", 1)]


def test_update_waits_for_the_optimizer_step_that_spans_two_batches(tmp_path):
    baseline = RunningMean()
    run(tmp_path, baseline, max_steps=1, gradient_accumulation_steps=4, steps_per_generation=2)
    names = [entry[0] for entry in baseline.log]
    assert names == [*["advantages", "backward", "backward"] * 2, "update", "update"]


def test_state_is_in_the_checkpoint_and_resumes(tmp_path):
    whole = RunningMean()
    run(tmp_path / "whole", whole, max_steps=8)
    half = RunningMean()
    run(tmp_path / "half", half, max_steps=4, save_strategy="steps", save_steps=4)
    checkpoint = tmp_path / "half" / "checkpoint-4"
    assert (checkpoint / FILE_NAME).is_file()
    resumed = RunningMean()
    run(tmp_path / "half", resumed, max_steps=8, resume=str(checkpoint))
    seen = [entry for entry in whole.log if entry[0] == "advantages"]
    assert [entry for entry in resumed.log if entry[0] == "advantages"] == seen[2:]
    assert resumed.state_dict() == whole.state_dict()


def test_resuming_with_another_baseline_is_refused(tmp_path):
    run(tmp_path, RunningMean(), max_steps=2, save_strategy="steps", save_steps=2)
    other = Rloo()
    other.log = []
    with pytest.raises(ValueError, match="saved with the baseline RunningMean, this run has Rloo"):
        run(tmp_path, other, max_steps=4, resume=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_without_the_state_is_refused(tmp_path):
    run(tmp_path, RunningMean(), max_steps=2, save_strategy="steps", save_steps=2)
    (tmp_path / "checkpoint-2" / FILE_NAME).unlink()
    with pytest.raises(ValueError, match="has no baseline_state"):
        run(tmp_path, RunningMean(), max_steps=4, resume=str(tmp_path / "checkpoint-2"))
