"""Reward functions as users write them: some are good, some have bugs."""

import os
import time


def length(completion: str, **row) -> float:
    return float(len(completion))


def process(completion: str) -> float:
    return float(os.getpid())


def right(completion: str, solution: str, bonus: float = 0.0, prompt: object = None) -> float | None:
    if solution == "none":
        return None
    return (1.0 if solution in completion else 0.0) + bonus


def moody(completion: str) -> float:
    if completion == "hang":
        while True:
            pass
    if completion == "sleep":
        time.sleep(1000)
    if completion == "eat":
        return float(len([bytearray(1 << 20) for _ in range(1 << 20)]))
    if completion == "die":
        os._exit(3)
    if completion == "print":
        print('{"value": 7.0}')
        os.write(1, b'{"value": 7.0}\n')
    return 1.0


def judged(completion: str, solution: str, scale: float, kind: str = "plain", prompt: str = "") -> float:
    key = os.environ["MY_KEY"]
    if completion == "tell":
        raise RuntimeError(f"no answer to {key} at {os.environ['MY_URL']}")
    return scale * len(key) + (kind == "kind") + len(solution)


async def scaled_later(completions, factor, solution, **kwargs):
    return [factor * len(gold) for gold in solution]


def scaled_now(completions, factor, solution, **kwargs):
    return [factor * len(gold) for gold in solution]


def buggy(completion: str, **row) -> float:
    if completion == "bug":
        raise KeyError("no such weight")
    return {"text": "high", "nan": float("nan"), "list": [1.0]}.get(completion, 0.25)


def nothing() -> float:
    return 1.0


class Scaled:
    """In TRL's form, with a parameter."""

    __name__ = "scaled"

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, completions, **kwargs):
        return [self.factor] * len(completions)


NUMBER = 3


def declared(completions, scale=1.0, **columns):
    return [scale * float(test in text) for text, test in zip(completions, columns["tests"], strict=True)]


declared.reads = ["tests"]
declared.reward_range = (0, 5)
declared.version = "7"
