"""The baseline's life: update after the policy update, state in checkpoints, strict loading."""

import pytest
import torch

from basis_rl.baselines import CenterScale, Rloo, check_state_keys
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.state import FILE_NAME, PendingBatches, load_parts, save_parts
from basis_rl.types import RolloutBatch
from tests.support.tiny import sums, tiny_trainer


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


def run(folder, baseline, resume=None, **settings):
    trainer = tiny_trainer(folder, baseline, Ordered, train_dataset=sums(32), **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_update_comes_after_the_policy_update_once_a_batch(tmp_path):
    baseline = RunningMean()
    run(tmp_path, baseline, max_steps=8, num_iterations=2)
    order = [entry[:2] if entry[0] != "backward" else entry for entry in baseline.log]
    passes = [("backward",)] * 4
    assert order == [entry for k in (0, 1) for entry in (("advantages", k), *passes, ("update", k))]


def test_update_waits_for_the_optimizer_step_that_spans_two_batches(tmp_path):
    baseline = RunningMean()
    run(tmp_path, baseline, max_steps=1, gradient_accumulation_steps=4, steps_per_generation=2)
    names = [entry[0] for entry in baseline.log]
    assert names == [*["advantages", "backward", "backward"] * 2, "update", "update"]
    assert baseline.log[-2:] == [("update", 0), ("update", 1)]


def waiting(*used_up):
    """Batches 0, 1, ... that are used up after so many micro-batches."""
    pending = PendingBatches()
    for step, count in enumerate(used_up):
        fields = {"rewards": torch.ones(1), "group_ids": torch.zeros(1).long(), "prompt_ids": ["a"]}
        pending.add(RolloutBatch(**fields, action_mask=torch.ones((1, 1)).bool(), step=step), count)
    return pending


def test_batches_that_are_drawn_again_are_forgotten():
    pending = waiting(4, 8, 12)
    pending.forget(1)
    assert [batch.step for batch, _ in pending.due(99)] == [0]


def test_each_rank_has_its_parts_back_and_a_new_rank_those_of_the_first(tmp_path):
    for rank in (0, 1):
        save_parts(tmp_path, rank, {"part": {"value": f"of rank {rank}"}})
    for rank, expected in ((0, "of rank 0"), (1, "of rank 1"), (2, "of rank 0")):
        assert load_parts(tmp_path, rank) == {"part": {"value": expected}}


def test_resuming_with_another_baseline_or_without_the_state_is_refused(tmp_path):
    run(tmp_path, RunningMean(), max_steps=2, save_strategy="steps", save_steps=2)
    other = Rloo()
    other.log = []
    resume = {"max_steps": 4, "resume": str(tmp_path / "checkpoint-2")}
    with pytest.raises(ValueError, match='baseline: "RunningMean", now "rloo"'):
        run(tmp_path, other, **resume)
    (tmp_path / "checkpoint-2" / FILE_NAME).unlink()
    with pytest.raises(ValueError, match=r"baseline_state\.pt is missing"):
        run(tmp_path, RunningMean(), **resume)
