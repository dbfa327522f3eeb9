"""The rollouts that a run keeps are those that it was trained on, with what it has computed of them."""

import math
from types import SimpleNamespace

import pandas
import pytest
import torch
from trl.trainer import grpo_trainer

from basis_rl.report.rollouts import text
from basis_rl.run.rollouts import files, read
from basis_rl.trainer.logs import per_rollout, rollout_rows
from basis_rl.types import RolloutBatch
from tests.support.tiny import parity_reward, tiny_trainer

SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 1}


def verdicts(completions, completion_ids, log_extra, **kwargs):
    scores = parity_reward(completions, completion_ids)
    log_extra("verdict", ["right" if score else "wrong" for score in scores])
    return [None if i == 1 else 2.0 * score for i, score in enumerate(scores)]


def second(completions, completion_ids, **kwargs):
    return [None if i == 1 else score for i, score in enumerate(parity_reward(completions, completion_ids))]


def recorded(trainer):
    """Batches and advantages of the whole run, as the baseline has returned them."""
    found = []
    asked = trainer.baseline.advantages

    def advantages(batch):
        result = asked(batch)
        found.append((batch, result))
        return result

    trainer.baseline.advantages = advantages
    return found


def test_rows_are_what_the_trainer_has_computed(tmp_path):
    trainer = tiny_trainer(
        tmp_path, reward_funcs=[verdicts, second], max_steps=4, steps_per_generation=2, log_completions=True
    )
    batches = recorded(trainer)
    trainer.train()
    kept = files(tmp_path)
    # A generation batch serves two steps; it is kept with the first one.
    assert list(kept) == [1, 3]
    for (step, path), (batch, result) in zip(kept.items(), batches, strict=True):
        rows = list(read([path]))
        table = pandas.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        assert len(rows) == len(batch.rewards) == len(table)
        assert {row["step"] for row in rows} == {step}
        assert [row["prompt_id"] for row in rows] == batch.prompt_ids
        rewards = [math.nan if row["reward"] is None else row["reward"] for row in rows]
        assert rewards == pytest.approx(batch.rewards.tolist(), nan_ok=True)
        assert math.isnan(rewards[1])
        assert sum(rewards[:1] + rewards[2:]) > 0
        assert [row["advantage"] for row in rows] == result.values.tolist()
        assert [row["baseline"] for row in rows] == result.baseline.tolist()
        assert [row["rewards"]["verdicts"] is None for row in rows] == [i == 1 for i in range(len(rows))]
        assert [row["rewards"]["second"] for row in rows[2:]] == table["second"].tolist()[2:]
        assert [row["extra"]["verdict"] for row in rows] == table["verdict"].tolist()
        assert [row["prompt"] for row in rows] == [said[0]["content"] for said in table["prompt"]]
        assert [row["completion"] for row in rows] == [said[0]["content"] for said in table["completion"]]
        assert [row["tokens"] for row in rows] == batch.action_mask.sum(dim=1).tolist()
        assert rows[0]["prompt"] in rows[0]["rendered"]
        assert any(row["cut_off"] for row in rows)


def test_a_resume_keeps_what_the_uninterrupted_run_does(tmp_path):
    tiny_trainer(tmp_path, prompt_sampler="frontier", **SAVING).train()
    kept = files(tmp_path)
    before = {step: list(read([path])) for step, path in kept.items()}
    assert list(before) == [1, 2, 3, 4]
    # Of steps that are run again.
    kept[4].rename(kept[4].with_name("step-000009.jsonl.gz"))
    kept[3].write_bytes(b"")
    tiny_trainer(tmp_path, prompt_sampler="frontier", **SAVING).train(str(tmp_path / "checkpoint-2"))
    assert {step: list(read([path])) for step, path in files(tmp_path).items()} == before
    # 2 of 16 prompts are drawn for each batch.
    chances = {row["chance"] for rows in before.values() for row in rows}
    assert len(chances) > 1
    assert all(0 < chance <= 1 for chance in chances)


def test_none_is_kept_with_0(tmp_path):
    tiny_trainer(tmp_path, keep_rollouts_mb=0, max_steps=1).train()
    assert files(tmp_path) == {}
    with pytest.raises(ValueError, match="keep_rollouts_mb"):
        tiny_trainer(tmp_path, keep_rollouts_mb=-1)


def test_trackers_get_the_table_that_they_get_from_trl(tmp_path, monkeypatch):
    """`log_completions` is TRL's, with the advantages that were trained on."""
    sent = []
    tracker = SimpleNamespace(run="a run", log=sent.append, Table=lambda dataframe: dataframe)
    for name in ("wandb", "trackio"):
        monkeypatch.setattr(grpo_trainer, name, tracker, raising=False)
    trainer = tiny_trainer(tmp_path, log_completions=True, max_steps=1)
    trainer.args.report_to = ["wandb", "trackio"]
    trainer.train()
    (rows,) = [list(read([path])) for path in files(tmp_path).values()]
    # TRL sends the last one again at the end.
    assert len(sent) >= 2
    for each in sent:
        assert each["completions"]["advantage"].tolist() == [row["advantage"] for row in rows]
        assert each["completions"]["completion"].tolist() == [
            [{"role": "assistant", "content": row["completion"]}] for row in rows
        ]


def test_all_turns_of_a_conversation_and_means_over_tokens():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    turns = [call, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "Two", "reasoning_content": "Hm"}]
    logs = {"prompt": ["p"], "completion": [turns], "rewards": {"f": [math.inf]}, "advantages": [0.5], "extra": {}}
    mask = torch.tensor([[True, True, False]])
    batch = RolloutBatch(
        rewards=torch.tensor([torch.nan]), group_ids=torch.zeros(1).long(), prompt_ids=["id"], action_mask=mask
    )
    values = per_rollout(torch.tensor([[1.0, 2.0, 9.0]]), mask)
    (row,) = rollout_rows(logs, batch, values, [0.25], [(3, True, "7")])
    for said in ("[assistant]", '"add"', "[tool]\n2", "Hm\nTwo"):
        assert said in row["completion"]
    assert (row["baseline"], row["reward"], row["rewards"], row["chance"]) == (1.5, None, {"f": None}, 0.25)
    assert (row["tokens"], row["cut_off"], row["prompt"], row["gold"]) == (3, True, "p", "7")
    asked = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "1?"}, turns[2],
             {"role": "user", "content": "2?"}]  # fmt: skip
    (row,) = rollout_rows({**logs, "prompt": [asked]}, batch, values, [0.25], [(3, True, ["7", "8"])])
    shown = text([{**row, "step": 1}])
    for said in ("gold ['7', '8']", "Be terse.", "1?", "Two", "2?"):
        assert said in shown
    (row,) = rollout_rows({**logs, "prompt": [asked[1:2]]}, batch, values, None, [(3, True, None)])
    assert row["prompt"] == "1?"
    assert "gold" not in text([{**row, "step": 1}])
