"""Building a table: the rewards of the training reward on the reference model's rollouts."""

import torch

from basis_rl.rollout import Sampling
from basis_rl.values import ValueTable
from basis_rl.values.build import build_table, describe
from basis_rl.values.provenance import fingerprint
from tests.tiny import parity_reward, sums, tiny_model, tiny_tokenizer


def length_reward(completions, log_metric, trainer_state, **kwargs):
    """Longer answers score higher; conversations as in training."""
    return [None if not c[0]["content"] else min(1.0, len(c[0]["content"]) / 20) for c in completions]


def test_rewards_provenance_and_fingerprints(tmp_path):
    tokenizer, dataset = tiny_tokenizer(), sums(6)
    torch.manual_seed(0)
    table = build_table(
        tiny_model(tokenizer),
        tokenizer,
        dataset,
        [parity_reward, length_reward],
        Sampling(max_new_tokens=6, repetition_penalty=1.1),
        num_rollouts=5,
        reward_weights=[1.0, 0.5],
        batch_size=7,
    )
    assert table.prompt_ids == dataset["prompt_id"]
    for prompt_id in table.prompt_ids:
        assert len(table.rewards(prompt_id)) == 5
        assert all(0 <= reward <= 1.5 for reward in table.rewards(prompt_id))
    assert table.reward_range[1] > 1.0
    assert table.provenance["reward"] == "1*parity_reward + 0.5*length_reward"
    assert table.provenance["max_completion_length"] == 6
    assert table.provenance["repetition_penalty"] == 1.1
    text = tokenizer.apply_chat_template(dataset[0]["prompt"], add_generation_prompt=True, tokenize=False)
    assert table.fingerprints[dataset[0]["prompt_id"]] == fingerprint(text)
    assert ValueTable.load(table.save(tmp_path / "t")).provenance == table.provenance


def test_description():
    table = ValueTable.from_rewards({"a": [0.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 1.0], "d": [0.0]})
    text = describe(table)
    assert "4 prompts, mean reward 0.375" in text
    assert "never solved 50.0%, always solved 25.0%" in text


def test_prompts_that_cannot_be_scored_are_left_out_and_counted(capsys):
    tokenizer, dataset = tiny_tokenizer(), sums(6)

    def picky(prompts, completions, solution, **kwargs):
        return [None if s == "5" else 1.0 for s in solution]

    table = build_table(tiny_model(tokenizer), tokenizer, dataset, [picky], Sampling(max_new_tokens=2), num_rollouts=2)
    assert len(table) == 5
    assert "1 of 6 prompts are left out" in capsys.readouterr().out
