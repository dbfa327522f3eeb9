"""`check_reward`: every registered reward keeps every promise, and each way of breaking one is told by its name."""

import asyncio
import functools
import inspect
import json
import sys

import pytest

from basis_rl.rewards.base import RewardError, check_reward, required_columns
from basis_rl.rewards.registry import REWARDS, build_reward
from basis_rl.values.provenance import reward_identity
from tests.support.fake_judge import JudgeServer, equal

PROMISES = ["name", "version", "golds", "signature", "result", "same_twice", "arguments", "order", "other_rows",
            "conversations", "strange", "columns", "close"]  # fmt: skip
MINE = "tests.rewards.user_functions"
ADD = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
CHAIN = {"question": "1 + 2 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
GYM = json.dumps({"dataset": "chain_sum", "entry": CHAIN})
# Parameters, and rows of which some are right, some wrong and some not scored.
ONE = {"num_workers": 1}
CODE = ["```\ndef add(a, b):\n    return a + b\n```", "none"]
FITTING = {
    "math_verify": (ONE, {"completions": [r"\boxed{2x}", r"\boxed{x}", "2x"], "solution": ["x+x", ["x", "y"], ""]}),
    "choice": ({}, {"completions": [r"\boxed{B}", "The answer is A.", ""], "solution": ["B", "B", "7"]}),
    "exact": ({}, {"completions": [r"\boxed{Paris}", "Rome", "x"], "solution": ["paris", ["Rome", "Roma"], None]}),
    "reasoning_gym": (ONE, {"completions": [r"\boxed{3}", r"\boxed{4}", "3"], "reasoning_gym": [GYM] * 3}),
    "format": ({}, {"completions": [r"<think>a</think>\boxed{1}", r"\boxed{1}"]}),
    "overlong": ({"cache": 4}, {"completions": ["a", "b" * 8, "c" * 30]}),
    "code": (ONE, {"completions": CODE, "solution": [ADD, ADD]}),
    "judge": (
        {"model": "m"},
        {"completions": ["Paris!", "Rome", ":", "Bonn"], "solution": ["Paris", "Bonn", "x", None]},
    ),
    f"pool:{MINE}:right": (ONE, {"completions": ["a", "b", "c"], "solution": ["a", "c", "none"]}),
}


@pytest.fixture(scope="module")
def judge():
    with JudgeServer(equal) as server:
        yield server


@pytest.mark.parametrize("name", FITTING)
def test_registered_rewards_keep_every_promise(name, judge):
    params, rows = FITTING[name]
    params = {**params, "base_url": judge.url} if name == "judge" else params
    reward = build_reward(name, params, {"max_completion_length": 10})
    assert check_reward(reward, rows) == PROMISES
    assert reward.__name__ == (f"{name}_reward" if name in REWARDS else "right")
    assert reward.version in reward_identity([reward])
    assert {"prompts", "completions"} <= set(inspect.signature(reward).parameters)
    given = {**rows, "completion_ids": [list(text) for text in rows["completions"]]}
    assert len(set(map(str, reward(prompts=rows["completions"], **given)))) > 1  # the rows do not all score the same
    reward.close()


def test_every_registered_reward_is_among_them():
    assert {name for name in FITTING if ":" not in name} == set(REWARDS)


def test_the_columns_that_a_reward_requires_are_its_parameters_without_a_default():
    def needs(prompts, completions, solution, level=0, *rest, hint, trainer_state, log_metric=None, **kwargs):
        return [1.0]

    assert required_columns(needs) == {"solution", "hint"}
    assert required_columns("org/a-model") == set()


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def plain(completions, **kwargs):
    return [float(len(text_of(completion))) for completion in completions]


async def later(completions, solution, **kwargs):
    return [1.0 if gold in text_of(text) else None for text, gold in zip(completions, solution, strict=True)]


def by_turn(completions, **kwargs):
    return [[length, 0.5] for length in plain(completions)]


class Good:
    """Keeps every promise; those below break one each."""

    __name__ = "good"
    version = "1"

    def __call__(self, completions, **kwargs):
        return [self.score(text_of(completion)) for completion in completions]

    def score(self, text):
        return float(len(text))


class ByHistory(Good):
    calls = 0

    def __call__(self, completions, **kwargs):
        self.calls += 1
        return [float(self.calls)] * len(completions)


class Closed(Good):
    open = True

    def close(self):
        assert self.open, "closed already"
        self.open = False


def of(**members):
    return type("Broken", (Good,), members)


def positional(completions, **kwargs):
    return [float(i) for i, _ in enumerate(completions)]


def by_batch(completions, **kwargs):
    longest = max(plain(completions))
    return [length / (longest or 1) for length in plain(completions)]


def emptying(completions, **kwargs):
    return [plain([completions.pop(0)])[0] for _ in range(len(completions))]


def without_kwargs(completions):
    return plain(completions)


BROKEN = {
    "no name": (functools.partial(plain), "name: it needs a `__name__`"),
    "a version that is no text": (of(version=3), "version: it has a `version` that is not a text, but 3"),
    "no room for columns": (without_kwargs, r"signature: it has no \*\*kwargs"),
    "not a number": (lambda completions, **kwargs: [float("nan")] * len(completions), "result: .*nan.* neither"),
    "always raises": (lambda completions, **kwargs: 1 / 0, "result: it raises ZeroDivisionError"),
    "a state": (ByHistory, "same_twice: it scores the same rows otherwise the second time"),
    "writes into its arguments": (emptying, "arguments: it writes into its arguments: completions"),
    "by position": (positional, "order: it scores rows by their position"),
    "by the batch": (by_batch, "other_rows: it scores a row otherwise when other rows are there"),
    "texts only": (lambda completions, **kwargs: [float(len(text)) for text in completions], "conversations: it"),
    "no empty text": (of(score=lambda self, text: float(text[0] == "S")), "strange: it raises IndexE.*rollout ''"),
    "no lone surrogate": (of(score=lambda self, text: float(len(text.encode()))), "strange: it raises UnicodeEnc"),
    "a column unknown": (lambda completions, **kwargs: [float(len(kwargs["solution"][0]))] * len(completions),
                         "columns: it raises KeyError: 'solution', when it has the columns of its signature only"),
    "golds by name": (of(check_golds=lambda self, solution: solution[:1]), "golds: it returns from check_gol"),
    "golds twice": (of(check_golds=lambda self, solution: [0, 0]), "golds: it returns an index twice"),
    "closed once": (Closed, "close: it raises AssertionError: closed already"),
}  # fmt: skip
COLUMNS = {"completions": ["So", "it is 22", "333", "", "55555", "666666"], "solution": list("123456")}


@pytest.mark.parametrize("kind", BROKEN)
def test_each_broken_promise_is_told_by_its_name(kind):
    make, message = BROKEN[kind]
    rows = COLUMNS if kind == "a column unknown" else None
    number = 2 if kind == "by position" else 1  # what depends on the position depends on the other rows
    with pytest.raises(RewardError, match=f"(?s)breaks {number} of the promises of a reward:\n- {message}") as error:
        check_reward(make, rows)
    assert "Traceback" not in str(error.value)


def test_all_broken_promises_are_told_at_once():
    def close(self):
        raise RuntimeError("line 1\nline 2")

    make = of(version=3, check_golds=lambda self, solution: None, close=close, score=lambda self, text: float(text[0]))
    with pytest.raises(RewardError) as error:
        check_reward(make, {"completions": ["1", "2"]})
    told = [line.split(":")[0] for line in str(error.value).splitlines()]
    assert told == ["Broken breaks 4 of the promises of a reward", "- version", "- golds", "- strange", "- close"]


@pytest.mark.parametrize("make", [plain, later, by_turn, Good, Good(), lambda: Good(), lambda: plain])
def test_a_function_a_class_an_object_and_what_builds_one(make):
    assert check_reward(make) == PROMISES


def test_a_coroutine_is_checked_where_a_loop_is_running_as_in_a_notebook():
    async def cell():
        return check_reward(later)

    assert asyncio.run(cell()) == PROMISES


class Hostile:
    def __getattr__(self, name):
        raise RuntimeError("no")


class Mute(Exception):
    def __str__(self):
        raise ValueError


def mute(completions, **kwargs):
    raise Mute


class NeedsMore:
    def __init__(self, much):
        pass


ODD = [None, "x", sys, print, type, Hostile(), mute, NeedsMore]


@pytest.mark.parametrize("odd", [*ODD, lambda: None, lambda: 1 / 0])
def test_whatever_it_is_given_is_answered_without_a_traceback(odd):
    with pytest.raises(RewardError) as error:
        check_reward(odd)
    assert error.value.__cause__ is None


def test_columns_of_different_lengths_are_the_callers_mistake():
    with pytest.raises(ValueError, match="columns of one length"):
        check_reward(plain, {"completions": ["a"], "solution": []})
