"""Accuracy: greedy answers, graded, missing scores counted as wrong."""

import pytest

from basis_rl.engine import Sampling, prompt_tokens, sample
from basis_rl.evaluation import accuracy
from tests.support.tiny import sums, tiny_model, tiny_tokenizer


def test_accuracy_is_the_mean_reward_in_dataset_order():
    tokenizer = tiny_tokenizer()
    seen = {}

    def reward(prompts, completions, solution):
        seen.update(solution=solution, completions=completions)
        return [None, *[1.0] * 3, *[0.0] * (len(completions) - 4)]

    result = accuracy(tiny_model(tokenizer), tokenizer, sums(8), reward, max_completion_length=4)
    assert result == pytest.approx(3 / 8)
    assert seen["solution"] == sums(8)["solution"]
    prompts = [prompt_tokens(prompt, tokenizer, {}) for prompt in sums(8)["prompt"]]
    drawn = dict(sample(tiny_model(tokenizer), tokenizer, prompts, Sampling(4, temperature=0.0)))
    assert seen["completions"] == [drawn[i][0].text for i in range(8)]
    assert len(set(seen["completions"])) > 1
