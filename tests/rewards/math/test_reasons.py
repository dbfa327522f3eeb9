r"""Why answers are wrong: each wrong one has one reason, which is the same whoever gives it and is true."""

import re
from collections import Counter

import pytest

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.grading import _equal, _gold_reading, grade
from basis_rl.rewards.math.latex import readings
from basis_rl.rewards.math.notation import normal_form
from basis_rl.rewards.math.quick import quick_verdict
from basis_rl.rewards.math.reading import in_terms_of
from basis_rl.rewards.math.reward import KINDS, REJECTED
from basis_rl.rewards.math.screen import LIMITS
from basis_rl.rewards.workers.pool import Outcome, WorkerPool
from tests.rewards.math.test_differences import CASES
from tests.rewards.math.test_quick import numerals
from tests.rewards.math.test_rules import DOCS, pairs
from tests.rewards.math.test_rules import WRONG as TABLES

WRONG = [
    *(pair for given in (*TABLES.values(), pairs("wrong_here")) for pair in given),
    *map(tuple, CASES["pairs"]),
]
UNSOUND = ("chain", "interval", "infinity", "modulus", "unit", "base", "approximation", "symbol", "near")
DETAILS = {
    "unsound": UNSOUND,
    "refused": ("beside", "dots", "builder", "hedged", "prime", "colon"),
    "screened": tuple(LIMITS),
}
# One gold and answer of each.
EXAMPLES = {
    "right": ("5", "5.0"),
    "unequal": ("5", "6"),
    "unread": ("5", "x =/= 5"),
    "prose": ("seven ? eight", "7"),
    "no_gold": ("", "7"),
    "refused: beside": ("0", r"\text{I give up, } 0"),
    "refused: dots": ("1,9", r"1,\ldots,9"),
    "refused: builder": ("4", r"\{x : x = 4\}"),
    "refused: hedged": ("5", "not x = 5"),
    "refused: prime": ("x^2", "(x^2)'"),
    "refused: colon": ("8:34", r"\frac{4}{17}"),
    "unsound: chain": ("8", "x = 7 = 8"),
    "unsound: interval": ("5", r"[5, 5]"),
    "unsound: infinity": (r"(-\infty,\infty)", r"[-\infty, \infty]"),
    "unsound: modulus": (r"7 \pmod{10}", r"7 \pmod{5}"),
    "unsound: unit": (r"6\text{ cm}", r"6\text{ mm}"),
    "unsound: base": ("110_2", "110_3"),
    "unsound: approximation": ("5", r"5 \approx 7"),
    "unsound: symbol": ("0", r"0 \cdot a"),
    "unsound: near": (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
    "screened: length": ("5", "5" + "+0" * 2_000),
    "screened: depth": ("5", "(" * 30 + "5" + ")" * 30),
    "screened: digits": ("5", "1" * 1_500),
    "screened: size": ("5", "9^{9^{9}}"),
    "screened: control": ("5", "5\x00"),
}


def verdicts(reward, given):
    """The verdicts on pairs, the scores, and the metrics."""
    said, metrics = {}, {}
    answers = [rf"\boxed{{{answer}}}" for _, answer in given]
    scores = reward(
        [], answers, [gold for gold, _ in given], log_metric=metrics.__setitem__, log_extra=said.__setitem__
    )
    return said["verdict"], scores, metrics


# Two readings, the first equal; a gold that the parser would read; a capital.
MORE = [
    ("8", r"x = 7 = 8\text{ cm}", "unsound: chain"),
    ("1 2 3", "6", "prose"),
    ("A", "(a)", "right"),
]


@pytest.mark.parametrize(("gold", "answer", "verdict"), [*((*pair, name) for name, pair in EXAMPLES.items()), *MORE])
def test_each_reason(gold, answer, verdict, reward):
    assert verdicts(reward, [(gold, answer)])[0] == [verdict]


def test_every_wrong_answer_has_one_that_is_known(reward):
    found, scores, metrics = verdicts(reward, WRONG)
    assert [verdict == "right" for verdict in found] == [score == 1.0 for score in scores]
    wrong = [verdict for verdict, score in zip(found, scores, strict=True) if score == 0.0]
    assert len(wrong) > 500
    for verdict in wrong:
        kind, _, detail = verdict.partition(": ")
        assert kind in (*REJECTED, "screened", "timeout", "no box")
        assert detail in DETAILS.get(kind, ("",))
    assert set(DETAILS) <= {verdict.partition(":")[0] for verdict in wrong}
    # The shares are those of the verdicts, and leave out only what is right.
    shares = Counter(verdict.partition(":")[0] for verdict in found)
    assert {name: metrics[f"reward/rejected/{name}"] * len(WRONG) for name in REJECTED} == pytest.approx(
        {name: shares[name] for name in REJECTED}
    )
    assert sum(metrics.values()) == pytest.approx(1 - scores.count(1.0) / len(WRONG))


def test_what_is_told_apart_from_unequal_is_equal_to_math_verify(reward):
    """Of the answers that Math-Verify was asked about, as they are read here."""
    asked = Counter()
    given = [pair for pair in WRONG if ":" not in "".join(pair)][::3]
    for (gold, answer), verdict in zip(given, verdicts(reward, given)[0], strict=True):
        kind = verdict.partition(":")[0]
        if kind in ("unsound", "unread", "unequal"):
            form = normal_form(gold)
            expected = _gold_reading(form)
            found = readings(in_terms_of(form, normal_form(answer)))
            assert any(_equal(expected, each) for each in found) == (kind == "unsound"), (gold, answer)
            assert bool(found) == (kind != "unread")
            asked[kind] += 1
    assert len(asked) == 3


@pytest.mark.parametrize("remembered", [True, False])
def test_reasons_are_the_same_a_second_time_and_from_other_processes(remembered, reward, monkeypatch):
    given = [*EXAMPLES.values(), *WRONG[::7]]
    before = verdicts(reward, given)[0]
    if remembered:
        monkeypatch.setattr(reward._pool, "run", lambda tasks, **given: [Outcome("crashed", {}) for _ in tasks])
        assert verdicts(reward, given)[0] == before
        return
    monkeypatch.setattr("basis_rl.rewards.math.reward.WorkerPool", WorkerPool)
    other = MathVerifyReward(num_workers=1, timeout=30.0)
    assert verdicts(other, given[::-1])[0][::-1] == before
    other.close()


def test_the_quick_way_says_what_a_worker_does():
    texts = numerals((0, 7, 1000))[::9]
    compared = 0
    for gold in [*texts, "A", r"\text{(B)}"]:
        for answer in [*texts[::5], "b"]:
            quick = quick_verdict(gold, answer)
            if quick is not None:
                assert grade(gold, answer) == ("right" if quick else "unequal"), (gold, answer)
                compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    ("golds", "answer", "verdict"),
    [
        (["7", "5"], "5", "right"),
        (["9", "x = 7"], "x = 7 = 9", "unsound: chain"),
        (["seven ? eight", "8"], "7", "unequal"),
        (["", "8"], "7", "unequal"),
        (["1" * 900, "8"], "1" * 1_500, "screened: digits"),
    ],
)
def test_of_several_golds_the_one_that_says_most(golds, answer, verdict, reward):
    assert verdicts(reward, [(golds, answer)])[0] == verdicts(reward, [(golds[::-1], answer)])[0] == [verdict]


def test_the_docs_have_every_reason():
    section = DOCS.read_text().partition("## Why an answer was wrong")[2].partition("\n## ")[0]
    named = {word for name in re.findall("`([^`]+)`", section) for word in name.split(": ")}
    assert {*KINDS, *(word for kind in DETAILS.values() for word in kind)} - {"right"} <= named


def test_the_answer_that_was_read_is_told(reward):
    said = {}
    reward([], [r"\boxed{6}", "6"], ["5", "5"], log_extra=said.__setitem__)
    assert said == {"verdict": ["unequal", "no box"], "answer": ["6", None]}
