"""ReMax in training: one greedy rollout a distinct prompt, the right one for each row, and no trace in the logs."""

import pytest
import torch

from basis_rl.baselines import ReMax
from basis_rl.rollout import Sampling, prompt_tokens, sample
from basis_rl.trainer import BasisTrainer
from tests.support.tiny import config, sums, tiny_tokenizer


class Keep(ReMax):
    def __init__(self):
        self.batches = []

    def advantages(self, batch):
        self.batches.append(batch)
        return super().advantages(batch)


@pytest.mark.parametrize("continuous", [False, True])
def test_greedy_rewards_are_those_of_greedy_decoding(continuous, tmp_path, tiny_path):
    calls = []

    def score(ids, solution):
        return (sum(ids) + 7 * int(solution)) % 97 / 97

    def reward(prompts, completions, completion_ids, solution, log_metric, log_extra, **kwargs):
        calls.append(len(completions))
        log_metric("reward/calls", 1.0)
        log_extra("number", [float(sum(ids)) for ids in completion_ids])
        return [score(ids, gold) for ids, gold in zip(completion_ids, solution, strict=True)]

    class Compare(BasisTrainer):
        expected: dict

        def _advantages(self, inputs, output):
            rows = {r["solution"]: r["prompt"] for r in inputs}
            tokenizer = tiny_tokenizer()
            tokens = [prompt_tokens(prompt, tokenizer, {}) for prompt in rows.values()]
            greedy = sample(self.model, tokenizer, tokens, Sampling(6, temperature=0.0))
            answers = {i: completions[0].token_ids for i, completions in greedy}
            self.model.train()
            self.expected = {gold: score(answers[i], gold) for i, gold in enumerate(rows)}
            self.rows = [r["solution"] for r in inputs]
            return super()._advantages(inputs, output)

    baseline = Keep()
    trainer = Compare(
        model=str(tiny_path),
        reward_funcs=reward,
        args=config(
            tmp_path,
            num_generations=4,
            max_steps=2,
            log_completions=True,
            use_transformers_continuous_batching=continuous,
        ),
        train_dataset=sums(),
        baseline=baseline,
    )
    before = trainer.generation_config
    trainer.train()
    (batch,) = baseline.batches
    expected = torch.tensor([trainer.expected[row] for row in trainer.rows])
    torch.testing.assert_close(batch.greedy_rewards, expected)
    assert len(set(expected.tolist())) > 1
    assert calls == [16, 4], "16 rollouts, and one greedy one for each of 4 prompts"
    assert trainer.generation_config is before
    assert len(trainer._logs["extra"]["number"]) == 16
    assert len(trainer._logs["rewards"]["reward"]) == 16
    assert not trainer._pending_metrics
