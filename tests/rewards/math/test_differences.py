"""Verdicts beside Math-Verify's on its own cases, whole rollouts, golds in other dress, the shortcut of the grading."""

import json
from functools import cache
from pathlib import Path

import pytest
from math_verify import parse, verify

from basis_rl.rewards.math.grading import _apart
from basis_rl.rewards.math.latex import readings
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


def test_what_differs_at_a_point_is_unequal_to_math_verify_too():
    """The shortcut of the grading, against what it cuts short."""
    texts = [
        "1", "50", "0.5", r"50\%", r"\frac{1}{3}", "0.333333", "0.3333", r"\sqrt{2}", "1.41421356", "2+3i", "3i+2",
        r"\pi", r"\infty", r"-\infty", "x", "2x", "x^2-1", "(x-1)(x+1)", r"\sqrt{x^2}", r"\frac{x}{100}", "x+y",
        "y+x", "x+z", "0", "0.0000001", "0.0000002", "10^{20}", "10^{20}+1", r"\sin^2 x+\cos^2 x", "e^{2x}",
        "(e^x)^2", "5!", "120", "11_2", "3", "7.0", "6.9999999", "f(x)", "2f(x)", r"\log_2 8", r"\frac{1}{0.0001}",
        "9999.99", r"\int_0^1 x dx", r"\sum_{k=1}^{3} k", r"\lim_{x \to 0} \frac{\sin x}{x}", "6",
        r"\tan \frac{\pi}{2}", r"\frac{1}{x-x}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "x=3", "(1,2)",
    ]  # fmt: skip
    values = [reading for text in texts for reading in readings(text)]
    apart = 0
    for one in values:
        for other in values:
            if _apart(one, other):
                apart += 1
                assert not verify(one, other, timeout_seconds=None), (one, other)
    assert 400 < apart < len(values) ** 2 - 2 * len(values)
