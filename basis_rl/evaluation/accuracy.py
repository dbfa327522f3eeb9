"""Accuracy of a model on a set of problems."""

from __future__ import annotations

from collections.abc import Callable

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from basis_rl.engine import Sampling, prompt_tokens, sample


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    reward: Callable[..., list[float | None]],
    *,
    max_completion_length: int,
    temperature: float = 0.0,
    batch_size: int = 256,
) -> float:
    """Mean reward of one completion of each problem, greedy by default, in [0, 1] for a 0/1 reward.

    A completion that could not be scored counts as wrong.

    Args:
        model: what is measured.
        tokenizer: its tokenizer.
        dataset: columns ``prompt`` and ``solution``.
        reward: a reward function that reads ``solution``.
        max_completion_length: tokens of a completion.
        temperature: 0 is greedy.
        batch_size: completions generated at a time.
    """
    prompts = list(dataset["prompt"])
    tokens = [prompt_tokens(prompt, tokenizer, {}) for prompt in prompts]
    answers = [""] * len(prompts)
    sampling = Sampling(max_completion_length, temperature=temperature)
    for index, completions in sample(model, tokenizer, tokens, sampling, batch_size=batch_size):
        answers[index] = completions[0].text
    # In one call, so that grading processes work in parallel.
    rewards = reward(prompts=prompts, completions=answers, solution=list(dataset["solution"]))
    return sum(r or 0.0 for r in rewards) / len(rewards)
