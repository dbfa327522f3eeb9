"""Verdicts beside Math-Verify's on its own cases, whole rollouts, golds in other dress."""

import json
from functools import cache
from pathlib import Path

import pytest
from math_verify import parse, verify

from benchmarks.reward.cases import FEW

CASES = json.loads(Path(__file__).with_name("math_verify_cases.json").read_text())


@cache
def parsed(text):
    return parse(rf"\boxed{{{text}}}", parsing_timeout=None)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)])
def test_its_own_cases(every, reward):
    """The verdict is Math-Verify's, but on the pairs of the file's other list, whose rows are in docs/rewards.md."""
    pairs = [tuple(pair) for pair in CASES["pairs"][::every]]
    for (gold, answer), here in zip(pairs, reward.equivalent(pairs), strict=True):
        there = bool(verify(parsed(gold), parsed(answer), timeout_seconds=None))
        assert (here != there) == ([gold, answer] in CASES["different"]), (gold, answer, here)


# V is the gold and N is another number.
ROLLOUTS = json.loads(Path(__file__).with_suffix(".json").read_text())["rollouts"]


@pytest.mark.parametrize(("shape", "score"), ROLLOUTS)
def test_whole_rollouts(shape, score, reward):
    golds = ["7", "0", r"\frac{1}{2}", r"\text{(C)}"]
    assert reward([], [shape.replace("V", gold).replace("N", "1234") for gold in golds], golds) == [score] * 4


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_gold_in_other_dress_is_right(real, reward, request):
    golds = FEW
    if real:
        lines = (request.getfixturevalue("shared_data") / "math500.jsonl").read_text().splitlines()
        golds = [json.loads(line)["answer"] for line in lines[::5]]
    pairs = [(gold, dress.format(gold)) for gold in golds for dress in ("${}$", " {} .", "**{}**")]
    assert [pair for pair, right in zip(pairs, reward.equivalent(pairs), strict=True) if not right] == []
