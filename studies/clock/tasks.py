"""What the models of the clock study are asked: rows to train on, held-out rows, and a reward."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
from datasets import Dataset

from basis_rl.data import prompt_id
from examples.smollm2 import problems

FAMILIES = ("letter_counting", "leg_counting", "syllogism")
GSM8K_TEXT = "{}\nThink step by step, then write the answer as #### and a number."
ANSWER = re.compile(r"-?\d+(?:,\d{3})*|\byes\b|\bno\b", re.IGNORECASE)


@dataclass(frozen=True)
class Task:
    """Rows have ``prompt`` (one message), ``prompt_id``, ``solution`` and ``kind``; `tokens` is the longest rollout."""

    train: Dataset
    held_out: list[dict[str, Any]]
    reward: Callable[..., list[float]]
    tokens: int


def last_answer(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """1 if the last number, yes or no of a rollout is the gold, else 0."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    found = [ANSWER.findall(text) for text in texts]
    return [
        float(bool(answers) and answers[-1].replace(",", "").lower() == gold.lower())
        for answers, gold in zip(found, solution, strict=True)
    ]


# Declared, so that beliefs need not learn it.
last_answer.reward_range = (0.0, 1.0)  # type: ignore[attr-defined]


def task_of(rows: list[dict[str, Any]], held_out: int, reward: Callable[..., list[float]], tokens: int) -> Task:
    """The first `held_out` of `rows` are held out, the others are trained on."""
    asked = [
        {
            **row,
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "prompt_id": prompt_id(row["prompt"], {"solution": row["solution"]}),
        }
        for row in rows
    ]
    return Task(Dataset.from_list(asked[held_out:]), asked[:held_out], reward, tokens)


def arithmetic(count: int, held_out: int, data: Path) -> Task:
    """Answers are numbers only, shorter than the question."""
    return task_of(problems.rows(count + held_out), held_out, problems.last_number, 12)


SPARSE = {"easy": 0.1, "learnable": 0.2, "out of reach": 0.7}


def sparse(count: int, held_out: int, data: Path) -> Task:
    """The same with most problems out of reach. The held-out ones are those of `arithmetic`."""
    held = problems.rows(count + held_out)[:held_out]
    asked = {row["prompt"] for row in held}
    spare = [row for row in problems.rows(count + held_out, 8, SPARSE) if row["prompt"] not in asked]
    return task_of(held + spare[:count], held_out, problems.last_number, 12)


WRITTEN_TEXT = "What is {} * {}?"
Factors = tuple[int, int]
# Shares of the kinds, and the ranges of a problem's two factors.
WRITTEN = {
    "easy": (0.3, (11, 99), (2, 9)),
    "learnable": (0.5, (11, 99), (11, 99)),
    "out of reach": (0.2, (101, 999), (101, 999)),
}


def written_solution(left: int, right: int) -> str:
    """A product written out: the products of the digits, then their sum, two at a time."""
    parts = [(each, other) for each in _places(left) for other in _places(right)]
    lines = [f"{each}*{other}={each * other}" for each, other in parts]
    total = parts[0][0] * parts[0][1]
    for each, other in parts[1:]:
        lines.append(f"{total}+{each * other}={total + each * other}")
        total += each * other
    return ", ".join(lines)


def _places(number: int) -> list[int]:
    """47 -> [40, 7]."""
    digits = str(number)
    return [int(digit) * 10 ** (len(digits) - place) for place, digit in enumerate(digits, 1) if digit != "0"]


def factors(kind: str, count: int, chance: random.Random) -> list[Factors]:
    """`count` different problems of a kind."""
    _, first, second = WRITTEN[kind]
    found: set[Factors] = set()
    while len(found) < count:
        found.add((chance.randint(*first), chance.randint(*second)))
    return sorted(found)


def written_rows(count: int) -> list[dict[str, Any]]:
    """`count` different products in the shares of `WRITTEN`, the same in every call."""
    chance = random.Random(7)
    found = [
        {"prompt": WRITTEN_TEXT.format(left, right), "solution": str(left * right), "kind": kind}
        for kind, (share, _, _) in WRITTEN.items()
        for left, right in factors(kind, round(share * count), chance)
    ]
    chance.shuffle(found)
    return found


def written(count: int, held_out: int, data: Path) -> Task:
    """Products that are written out, for the model of `studies.clock.warm`: rollouts are far longer than questions."""
    return task_of(written_rows(count + held_out), held_out, problems.last_number, 96)


def words(count: int, held_out: int, data: Path) -> Task:
    """Three families of reasoning_gym, in turn."""
    size = (count + held_out) // len(FAMILIES) + 1
    rows = []
    for entries in zip(*(reasoning_gym.create_dataset(name, size=size, seed=7) for name in FAMILIES), strict=True):
        for family, entry in zip(FAMILIES, entries, strict=True):
            rows.append({"prompt": entry["question"], "solution": entry["answer"], "kind": family})
    return task_of(rows[: count + held_out], held_out, last_answer, 32)


def gsm8k(count: int, held_out: int, data: Path) -> Task:
    """Word problems of the files ``gsm8k_train.jsonl`` and ``gsm8k_test.jsonl`` in `data`."""
    parts = []
    for part, size in (("test", held_out), ("train", count)):
        lines = (data / f"gsm8k_{part}.jsonl").read_text().splitlines()[:size]
        parts += [json.loads(line) for line in lines]
    rows = [
        {"prompt": GSM8K_TEXT.format(each["question"]), "kind": "gsm8k"}
        | {"solution": each["answer"].rsplit("####", 1)[1].strip().replace(",", "")}
        for each in parts
    ]
    return task_of(rows, held_out, last_answer, 200)


TASKS: dict[str, Callable[[int, int, Path], Task]] = {
    "arithmetic": arithmetic,
    "sparse": sparse,
    "written": written,
    "words": words,
    "gsm8k": gsm8k,
}
