"""A small model that knows the form of "higher or lower", and plays it well in some games only."""

from __future__ import annotations

import random
from typing import Any

from transformers import PreTrainedTokenizerFast

from examples.environments.higher_lower import HigherLower
from examples.quickstart.warm_start import build_tokenizer
from examples.tools.warm_start import CHAT_TEMPLATE, RESPONSE_TEMPLATE

# What the model says when the game has ended.
LAST = "done"


def game(seed: int, size: int, guesses: int, *, skilled: bool) -> list[dict[str, Any]]:
    """A whole game, in which each guess halves what is left (`skilled`) or is any number."""
    environment = HigherLower(size, guesses)
    chance = random.Random(seed + 1)
    messages: list[dict[str, Any]] = [{"role": "user", "content": environment.reset(seed)}]
    low = 1
    high = size
    answer = ""
    while answer not in ("right", "over"):
        number = (low + high) // 2 if skilled else chance.randint(1, size)
        answer = environment.guess(number)
        call = {"type": "function", "function": {"name": "guess", "arguments": {"number": number}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "guess", "content": answer})
        low = number + 1 if answer == "higher" else low
        high = number - 1 if answer == "lower" else high
    return [*messages, {"role": "assistant", "content": LAST}]


def games(count: int, size: int, guesses: int, *, skilled_share: float, seed: int) -> list[list[dict[str, Any]]]:
    """`count` games, of which about the share `skilled_share` is played well."""
    chance = random.Random(seed)
    # Far from the seeds that a run plays.
    first = 10**6
    return [game(first + i, size, guesses, skilled=chance.random() < skilled_share) for i in range(count)]


def game_tokenizer(size: int, guesses: int) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template for tools; text that all games share becomes few tokens."""
    call = '<tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>'
    question = HigherLower(size, guesses).reset(0)
    words = [question, call, "higher", "lower", "right", "over", LAST, "assistant\n", "user\n", "tool\n"]
    tokenizer = build_tokenizer(words * 100, vocab_size=400)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer
