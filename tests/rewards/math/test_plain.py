"""``rules: plain`` is Math-Verify and nothing else."""

import itertools
import json
import time
from pathlib import Path

import pytest
from math_verify import parse, verify

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.screen import measure
from benchmarks.reward.cases import FEW, cases

TABLES = json.loads(Path(__file__).with_name("answers.json").read_text())
PAIRS = [
    (gold, answer) for name in ("right", "wrong", "right_here", "wrong_here") for gold, *rest in TABLES[name]["rows"]
    for answer in rest
]  # fmt: skip
RENDERINGS = (r"So \boxed{%s}.", r"The answer is $%s$.", "#### %s", "<answer>%s</answer>", r"\[ x = %s \]", "%s")
# Math-Verify ends these by its own clock, or reads them slowly, or nothing in them.
HOSTILE = (
    r"\boxed{" + "(" * 25 + "2" + ")" * 25 + "}", r"\boxed{" + r"\sin(" * 30 + "}", "", r"\boxed{}", "\ud800 5",
    r"\boxed{9^{9^{9}}}", "answer " * 2_000 + "5",
)  # fmt: skip


def expected(gold, text):
    return float(verify(parse(rf"\boxed{{{gold}}}"), parse(text)))


@pytest.fixture(scope="module")
def plain(reward):
    other = MathVerifyReward(num_workers=1, rules="plain")
    other._pool.close()
    other._pool = reward._pool
    return other


def differences(plain, rows):
    """Rows with another verdict, both times that they are asked, the second time alone.

    Math-Verify stops after 5 s by the clock. Whether a slow row is over by then depends on the machine's load, and on
    whether the parser has met such rows before; a row that was asked once is fast afterwards, in a worker as here. One
    that takes more than half a second here even so is not compared.
    """
    scores = plain([], [text for _, text in rows], solution=[gold for gold, _ in rows])
    doubtful = [row for row, score in zip(rows, scores, strict=True) if score != expected(*row)]
    found = []
    for gold, text in doubtful:
        again = plain([], [text], solution=[gold])[0]
        began = time.perf_counter()
        if again != expected(gold, text) and time.perf_counter() - began < 0.5:
            found.append((gold, text, again))
    return found


@pytest.mark.parametrize("part", [7, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_no_verdict_differs_from_math_verify_s(plain, part):
    # The parser's time is exponential in the depth of brackets, which is HOSTILE's subject.
    pairs = [(gold, answer) for gold, answer in PAIRS if measure("depth", answer) < 10]
    texts = itertools.cycle(RENDERINGS)
    rows = [(gold, text.replace("%s", answer)) for (gold, answer), text in zip(pairs, texts, strict=False)][::part]
    rows += [(case.gold, case.completion) for case in cases(FEW, 400 // part**2, seed=1)]
    assert differences(plain, rows) == []
    assert len(rows) > 40
    assert {expected(*row) for row in rows[:40]} == {0.0, 1.0}


@pytest.mark.long
def test_nor_where_math_verify_s_time_is_over():
    with_own_limit = MathVerifyReward(num_workers=1, rules="plain", timeout=1.0)
    rows = [("5", text) for text in HOSTILE]
    assert differences(with_own_limit, rows) == []


def test_rules_and_thoughts_of_the_package_do_not_count(plain, reward):
    # Right to Math-Verify alone: no box, a retracted box, a thought that is never closed.
    texts = ["no box: 7", r"\boxed{7} no, \boxed{8", r"<think>\boxed{7}"]
    plain.tell_template("{{ '</think>' }}", asks_for_box=True)
    assert plain([], texts, solution=["7"] * 3) == [1.0, expected("7", texts[1]), 1.0]
    assert reward([], texts[:2], solution=["7"] * 2) == [0.0, 0.0]
    assert reward.plain(texts, ["7"] * 3) == plain([], texts, solution=["7"] * 3)


def test_golds_and_votes_are_plain_too(plain):
    assert plain.check_golds(["7", "", r"\frac{1}{2}", None, ["", "7"]]) == [1, 3]
    assert plain([], ["7"] * 2, solution=["", ["8", "7"]]) == [None, 1.0]
    assert plain.equivalent([("0.5", r"\frac{1}{2}"), ("1000", r"1\,000")]) == [True, False]
