"""Accuracy of a model on a set of problems."""

from __future__ import annotations

from collections.abc import Callable

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from basis_rl.rollout import sample
from basis_rl.values.provenance import rendered_prompt


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
    texts = [rendered_prompt(prompt, tokenizer, {}) for prompt in dataset["prompt"]]
    answers = [""] * len(texts)
    for index, completions in sample(
        model,
        tokenizer,
        texts,
        max_new_tokens=max_completion_length,
        temperature=temperature,
        batch_size=batch_size,
    ):
        answers[index] = completions[0].text
    rewards = reward(prompts=texts, completions=answers, solution=list(dataset["solution"]))
    return sum(r or 0.0 for r in rewards) / len(rewards)
