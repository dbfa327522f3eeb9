"""Rollouts, tokens and seconds in the log: counted one by one, over a resume, with ReMax's greedy rollouts."""

import pytest

from basis_rl.run.usage import Usage
from basis_rl.trainer import BasisTrainer
from tests.support.tiny import sums, tiny_trainer


def counting(folder, baseline, **settings):
    """A trainer, and the lengths of all that it samples in training, in order."""
    lengths = []

    class Counting(BasisTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            result = super()._generate_single_turn(*args, **kwargs)
            if self.model.training:
                lengths.append([len(ids) for ids in result[0]])
            return result

    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "eval_dataset": sums(4)}
    trainer = tiny_trainer(folder, baseline, Counting, **{**saving, **settings})
    return trainer, lengths


def train(folder, baseline, resume=None, **settings):
    trainer, lengths = counting(folder, baseline, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.log_history, lengths


def test_a_second_call_of_train_counts_anew(tmp_path):
    trainer, _ = counting(tmp_path, "batch_mean", max_steps=2, save_strategy="no")
    for _ in range(2):
        trainer.train()
        assert trainer.spending.drawn[0] == 16


@pytest.mark.parametrize("name", ["batch_mean", "remax"])
def test_counts_are_those_of_what_was_sampled(name, tmp_path):
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    log, lengths = train(tmp_path / "whole", name, **evaluated)
    calls = 2 if name == "remax" else 1
    for row in log[:-1]:
        drawn = lengths[: calls * -(-row["step"] // 2)]  # a batch serves two steps
        assert row["num_rollouts"] == sum(map(len, drawn))
        assert row["num_rollout_tokens"] == sum(map(sum, drawn))
    assert any("eval_reward" in row for row in log)
    assert len(lengths[0]) == 16
    assert name != "remax" or len(lengths[1]) == 4, "one greedy rollout per prompt"
    resumed, _ = train(tmp_path / "again", name, str(tmp_path / "whole" / "checkpoint-3"), **evaluated)
    for old, new in zip(log, resumed, strict=True):
        assert all(old[key] == new[key] for key in ("step", "num_rollouts", "num_rollout_tokens"))
    assert [row["seconds"] for row in resumed] == sorted(row["seconds"] for row in resumed)


def test_seconds_go_on_where_they_were(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("basis_rl.run.usage.time.perf_counter", lambda: clock[0])
    first = Usage()
    first.draw(4, 30)
    first.draw(2, 5)
    clock[0] = 107.5
    assert first.seconds == 7.5
    assert first.drawn == (6, 35)
    state = first.state_dict()
    clock[0] = 1000.0
    second = Usage()
    second.load_state_dict(state)
    clock[0] = 1002.0
    second.draw(1, 1)
    assert second.seconds == 9.5
    assert second.drawn == (7, 36)
    assert list(second.metrics().values()) == [7, 36, 9.5]
