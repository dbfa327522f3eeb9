"""Problems of arithmetic of which a small model solves some, can learn some, and will never solve the rest.

Half of them are within reach of a model with 135M parameters, three in ten are nearly solved from the start or after a
few steps, and two in ten are out of reach. That is what data sets for training look like to a given model, and what a
sampler of prompts is for.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

SHARES = {"easy": 0.3, "learnable": 0.5, "out of reach": 0.2}
TEXT = "What is {} {} {}? Reply with the number only."
NUMBER = re.compile(r"-?\d+(?:,\d{3})*")
Problem = tuple[int, str, int]
ANSWER: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


def easy(chance: random.Random) -> Problem:
    """Two digits and one, without a carry."""
    tens = 10 * chance.randint(1, 9)
    one = chance.randint(1, 8)
    other = chance.randint(1, 9 - one)
    return chance.choice([(tens + one, "+", other), (tens + one + other, "-", other)])


def learnable(chance: random.Random) -> Problem:
    """Sums and differences of two numbers with two digits."""
    first = chance.randint(10, 99)
    second = chance.randint(10, 99)
    return chance.choice([(first, "+", second), (max(first, second), "-", min(first, second))])


def out_of_reach(chance: random.Random) -> Problem:
    """Products of two numbers with three digits."""
    return chance.randint(101, 999), "*", chance.randint(101, 999)


KINDS = {"easy": easy, "learnable": learnable, "out of reach": out_of_reach}


def rows(count: int, seed: int = 7, shares: Mapping[str, float] = SHARES) -> list[dict[str, Any]]:
    """`count` different problems with these shares of the kinds, in random order, the same for a seed.

    Each has ``prompt`` (the question), ``solution`` (the gold) and ``kind``.

    Raises:
        ValueError: there are not as many different problems of a kind (648 are easy).
    """
    chance = random.Random(seed)
    found = [row for kind, share in shares.items() for row in _different(kind, round(share * count), chance)]
    chance.shuffle(found)
    return found


def _different(kind: str, count: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    problems: set[Problem] = set()
    repeated = 0
    while len(problems) < count:
        left, sign, right = problem = KINDS[kind](chance)
        if problem in problems:
            repeated += 1
            if repeated > 100 * count:
                raise ValueError(f"There are only about {len(problems)} {kind} problems: ask for fewer in all.")
        else:
            problems.add(problem)
            answer = ANSWER[sign](left, right)
            yield {"prompt": TEXT.format(left, sign, right), "solution": str(answer), "kind": kind}


def write(folder: Path, train: int = 1_400, held_out: int = 400) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``test.jsonl``, which have no problem in common."""
    problems = rows(train + held_out)
    parts = {"test": problems[:held_out], "train": problems[held_out:]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder / "train.jsonl", folder / "test.jsonl"


def last_number(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """1 if the last number of a rollout is the gold, else 0."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    found = [NUMBER.findall(text) for text in texts]
    return [
        float(bool(numbers) and numbers[-1].replace(",", "") == gold)
        for numbers, gold in zip(found, solution, strict=True)
    ]


# Declared, so that beliefs need not learn it.
last_number.reward_range = (0.0, 1.0)  # type: ignore[attr-defined]
