"""What the models of `studies.clock.streams` are asked: problems with a slow calculator, and explanations."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from basis_rl.rewards.extract import completion_text
from basis_rl.tools import ToolResult, calculator
from benchmarks.trainers import parity
from examples.smollm2 import problems
from studies.clock.tasks import Task, task_of

TEXT = "What is {} {} {}?"
# Seconds until the calculator answers: log-normal. One call in a hundred takes twenty times the median.
MEDIAN = 1.0
SIGMA = math.log(20) / 2.326
# As a sandbox has, at which it answers all the same.
TIMEOUT = 60.0
LARGEST = 99
# Calls that run at the same time.
MOST_CALLS = 512
TOKENS = 72
PROBLEMS = 460
SHARES = {"easy": 0.3, "learnable": 0.5, "out of reach": 0.2}
# Shares of each kind's solutions that call the calculator, in the warm start.
CALLED = {"easy": 0.6, "learnable": 0.2, "out of reach": 0.2}


class SlowCalculator:
    """A calculator of numbers below 100 whose answers take time, for sleeping threads.

    How long depends on the expression and on how often it was asked before, so it is the same for every row.
    """

    __name__ = "calculator"

    def __init__(self, median: float = MEDIAN) -> None:
        self.median = median
        self.pool = ThreadPoolExecutor(MOST_CALLS)
        self.lock = threading.Lock()
        self.asked = Counter[str]()

    def __call__(self, expression: str) -> str:
        """Calculate with numbers below 100.

        Args:
            expression: Numbers, + - * /
        """
        largest = max((int(number) for number in problems.NUMBER.findall(expression)), default=0)
        return calculator(expression) if largest <= LARGEST else "Error: a number is too large."

    def start(self, expression: str) -> Future[ToolResult]:
        with self.lock:
            self.asked[expression] += 1
            number = self.asked[expression]
        return self.pool.submit(self.work, expression, self.median * delay(expression, number))

    def work(self, expression: str, seconds: float) -> ToolResult:
        time.sleep(seconds)
        try:
            return ToolResult(self(expression))
        except ValueError as error:
            return ToolResult(f"Error: {error}", failed=True)


def delay(expression: str, number: int) -> float:
    """Medians that call `number` of this expression takes."""
    return min(TIMEOUT, random.Random(f"{expression}#{number}").lognormvariate(0.0, SIGMA))


def learnable(chance: random.Random) -> problems.Problem:
    """Products of two digits and two, for which the model needs the calculator."""
    return chance.randint(11, 99), "*", chance.randint(11, 99)


def rows(count: int = PROBLEMS, seed: int = 7) -> list[dict[str, Any]]:
    """`count` different problems, the same for a seed: sums without a carry, products of two digits, and of three."""
    chance = random.Random(seed)
    kinds = {**problems.KINDS, "learnable": learnable}
    found: dict[str, dict[str, Any]] = {}
    for kind, share in SHARES.items():
        most = len(found) + round(share * count)
        while len(found) < most:
            left, sign, right = kinds[kind](chance)
            text = TEXT.format(left, sign, right)
            found[text] = {"prompt": text, "solution": str(problems.ANSWER[sign](left, right)), "kind": kind}
    mixed = list(found.values())
    chance.shuffle(mixed)
    return mixed


def last_number(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """1 if the last number of the model's last turn is the gold, else 0."""
    return problems.last_number([completion_text(each) for each in completions], solution)


last_number.reward_range = (0.0, 1.0)  # type: ignore[attr-defined]


def tooled(held_out: int) -> Task:
    """Problems for the model of ``studies.clock.warm --task tooled``."""
    return task_of(rows(), held_out, last_number, TOKENS)


def call(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The turn that asks the calculator, and its answer."""
    expression = row["prompt"].removeprefix("What is ").rstrip("?").replace(" ", "")
    function = {"name": "calculator", "arguments": {"expression": expression}}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [asked, {"role": "tool", "name": "calculator", "content": SlowCalculator(0.0)(expression)}]


def solutions(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Turns to warm the model on: of the shares `CALLED` of the problems a call and an answer, else an answer alone.

    None of the problems is among those of `tooled`.
    """
    taken = {row["prompt"] for row in rows()}
    chance = random.Random(seed)
    found = []
    for row in rows(count, seed):
        if row["prompt"] not in taken:
            question = {"role": "user", "content": row["prompt"]}
            answer = {"role": "assistant", "content": row["solution"]}
            if chance.random() < CALLED[row["kind"]]:
                asked, told = call(row)
                found.append({"prompt": [question], "completion": [asked]})
                found.append({"prompt": [question, asked, told], "completion": [answer]})
            else:
                found.append({"prompt": [question], "completion": [answer]})
    chance.shuffle(found)
    return found


THINGS = (
    "a bicycle", "the rain", "a bank", "a lock", "bread", "a mirror", "the moon", "a magnet", "soap", "a river",
    "a clock", "an echo", "a battery", "the heart", "a lighthouse", "paper", "a vaccine", "a kite", "glass", "a seed",
)  # fmt: skip
SIZES = ("one word", "one sentence", "two sentences", "a short paragraph", "a few steps", "a list of ten points")


def explained() -> Task:
    """Explanations of different lengths. The reward, a coin, leaves the lengths as they are."""
    asked = [f"Explain {thing} in {size}." for thing in THINGS for size in SIZES]
    random.Random(7).shuffle(asked)
    found = [{"prompt": text, "solution": "", "kind": "explained"} for text in asked]
    return task_of(found, 0, parity, 256)
