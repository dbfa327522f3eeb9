"""Knights-and-knaves puzzles of reasoning-gym in a short notation for models that read no English, and its tokenizer.

A problem is ``A says iff B+ C- . B says A- .`` and its solution ``A+ B-``: the statements that reasoning-gym draws
(from its own metadata) in prefix notation, with people as letters in order, and ``+`` for a person who tells the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from basis_rl.data import prompt_id
from examples.quickstart.warm_start import CHAT_TEMPLATE, END, PAD, START

PEOPLE = "ABCDEFGH"
_WORDS = {"and": "and", "or": "or", "not": "not", "->": "if", "<=>": "iff"}
_SIGNS = {"telling-truth": "+", "lying": "-"}


def statement(tree: Sequence[Any]) -> str:
    """A statement of reasoning-gym as words: the operator first, then its operands."""
    if tree[0] in _SIGNS:
        return PEOPLE[tree[1]] + _SIGNS[tree[0]]
    return " ".join([_WORDS[tree[0]], *map(statement, tree[1:])])


def holds(words: list[str], roles: dict[str, bool]) -> bool:
    """Whether the statement at the start of `words` is true; its words are removed from the list."""
    word = words.pop(0)
    if word == "not":
        return not holds(words, roles)
    if word in ("and", "or", "if", "iff"):
        left, right = holds(words, roles), holds(words, roles)
        return {"and": left and right, "or": left or right, "if": right or not left, "iff": left == right}[word]
    return roles[word[0]] == (word[1] == "+")


def is_solution(question: str, answer: str) -> bool:
    """Whether each person's statement is true if and only if the person tells the truth."""
    roles = {word[0]: word[1] == "+" for word in answer.split()}
    said = [part.split(" says ") for part in question.rstrip(" .").split(" . ")]
    return all(holds(words.split(), roles) == roles[who] for who, words in said)


def puzzles(people: int, count: int, seed: int) -> list[tuple[str, str]]:
    """At most `count` different puzzles ``(question, solution)``; fewer if not as many exist (two people)."""
    import reasoning_gym

    found: dict[str, str] = {}
    for entry in reasoning_gym.create_dataset("knights_knaves", size=count, seed=seed, n_people=people):
        told = entry["metadata"]
        said = [f"{PEOPLE[i]} says {statement(tree)} ." for i, tree in enumerate(told["statements"])]
        found[" ".join(said)] = " ".join(PEOPLE[i] + "-+"[truth] for i, truth in enumerate(told["solution"]))
    return list(found.items())


def split(
    people: Sequence[int], train: int, test: int, seed: int
) -> tuple[dict[int, list[tuple[str, str]]], dict[int, list[tuple[str, str]]]]:
    """Puzzles for training and puzzles for measuring, by number of people; no puzzle is in both."""
    training, measured = {}, {}
    for n in people:
        found = puzzles(n, train + test, seed)
        held_out = min(test, len(found) // 3)
        training[n], measured[n] = found[held_out:], found[:held_out]
    return training, measured


def dataset(rows: Sequence[tuple[str, str]]) -> Dataset:
    """A dataset with the columns that the trainer expects."""
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": question}], "solution": solution, "prompt_id": prompt_id(question)}
            for question, solution in rows
        ]
    )


def tokenizer(people: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words, people with a sign, and brackets."""
    words = [PAD, START, END, "[unknown]", "user", "assistant", "says", ".", "\\boxed{", "}", *_WORDS.values()]
    words += list(PEOPLE[:people]) + [letter + sign for letter in PEOPLE[:people] for sign in "+-"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[unknown]"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("{", "merged_with_previous"),
            pre_tokenizers.Split("}", "isolated"),
            pre_tokenizers.WhitespaceSplit(),
        ]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=END, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def reward(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """1 if the boxed roles are those of the solution, else 0."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.split() == ["\\boxed{", *gold.split(), "}"]) for text, gold in zip(texts, solution, strict=True)]
