r"""The verdicts without Math-Verify are Math-Verify's, pair by pair, but for the listed differences."""

import itertools
import json
import random
import re
import string
from functools import cache
from pathlib import Path

import pytest
from math_verify import parse, verify
from sympy import srepr

from basis_rl.rewards.extract import plain_number
from basis_rl.rewards.math.grading import grade
from basis_rl.rewards.math.quick import quick_verdict, same_text
from basis_rl.rewards.math.reward import REJECTED, gold_answers

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())


@cache
def parsed(text):
    """What Math-Verify reads, its formulas written out, and the texts that it keeps."""
    read = parse(rf"\boxed{{{text}}}", parsing_timeout=None)
    kept = {each.strip() for each in read if isinstance(each, str)} - {""}
    return read, tuple(srepr(each) for each in read if not isinstance(each, str)), kept


VERDICTS = {}


def math_verify(gold, answer):
    """Asked once for all texts that it reads alike: it compares formulas with each other, and texts with texts."""
    (one, formulas, texts), (other, other_formulas, other_texts) = parsed(gold), parsed(answer)
    key = formulas, other_formulas, texts.isdisjoint(other_texts)
    if key not in VERDICTS:
        VERDICTS[key] = verify(one, other, timeout_seconds=None)
    return VERDICTS[key]


def listed(gold, answer, quick):
    """Whether a difference is a known one: a notation that Math-Verify misreads."""
    both = (gold, answer)
    e_notation = any(re.search(r"\d[eE][-+]?\d", text) for text in both)
    thin_space = any(re.search(r"\d\\,\s*\d", text) for text in both)
    if not quick:  # it multiplies: e_product, thin_space_product
        return e_notation or thin_space
    trailing_point = any(re.search(r"\d\.(?!\d)", text) for text in both)
    signed_thousands = any(re.search(r"\+\s*\d{1,3}(?:\{,\}|,(?:\\!)?)\d{3}", text) for text in both)
    scientific = any(re.search(r"\\times|\\cdot|\*", text) for text in both)
    quotient = any("." in text and ("/" in text or "frac" in text) for text in both)
    equal = plain_number(gold) == plain_number(answer)
    return equal and (e_notation or thin_space or trailing_point or signed_thousands or scientific or quotient)


WHOLE = CASES["whole"]
QUOTIENTS = CASES["quotients"]
DECIMALS = CASES["decimals"]


def numerals(integers):
    texts = []
    for n, sign in itertools.product(integers, ("", "-", "+")):
        texts += [form.format(s=sign, n=n) for form in WHOLE]
        if n >= 1000:
            texts += [f"{sign}{n:,}".replace(",", by) for by in (",", "{,}", r",\!", r"\,")] + [f"{sign}{n:,}.25"]
    for (a, b), sign in itertools.product([(1, 2), (2, 4), (1, 3), (3, 4), (7, 3), (12, 100), (1000, 3)], ("", "-")):
        texts += [form.format(s=sign, a=a, b=b) for form in QUOTIENTS]
    return list(dict.fromkeys(text for text in [*texts, *DECIMALS] if plain_number(text) is not None))


# Never numerals: what they are is for Math-Verify to say, never for the quick path.
OTHERS = CASES["others"]


def compare(pairs):
    """Each verdict is Math-Verify's or listed; how many pairs are left to Math-Verify."""
    asked = 0
    for gold, answer in pairs:
        quick = quick_verdict(gold, answer)
        if quick is None:
            asked += 1
        elif quick != math_verify(gold, answer):
            assert listed(gold, answer, quick), (gold, answer, quick)
    return asked


def test_numerals_are_compared_as_math_verify_does():
    texts = numerals((0, 2, 7, 100, 111, 1000, 10080, 333333))
    rng = random.Random(0)
    assert compare((rng.choice(texts), rng.choice(texts)) for _ in range(120)) < 10
    # Pairs of equal or near value are rare among those, and are what a mistake would hide in.
    by_value = sorted(texts, key=plain_number)
    places = rng.sample(range(len(texts) - 3), 100)
    compare((by_value[i], by_value[i + rng.randint(1, 3)]) for i in places)


@pytest.mark.long
def test_all_pairs_of_numerals():
    texts = numerals((0, 1, 2, 3, 7, 10, 33, 111, 1000, 1234, 333333))
    assert compare(itertools.product(texts, texts)) < 0.01 * len(texts) ** 2


def test_other_notations_are_never_taken_for_numerals():
    for text in OTHERS:
        assert plain_number(text) is None
        assert quick_verdict(text, "5") is quick_verdict("5", text) is None
    compare(itertools.product(OTHERS, numerals((2, 1000))[:60:6]))


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("1", "1.000001", None),  # Math-Verify rounds
        ("1", "1.0000021", False),
        ("1", "1.0000019", None),
        ("1/3", "333333/1000000", False),  # without a point both are exact
        ("1000000000000.1", "1000000000000.2", None),  # what a float may not tell apart
        ("1000000000000.1", "1000000002000.1", False),
        ("5", "B", False),
        ("B", "5", False),
        *((gold, answer, None) for gold, answer in (("B", "x^2"), ("e", "2.718282"), ("i", "B"))),
        ("7", " " * 80 + "7", None),
        ("7" * 80, "8" * 80, None),
        ("7" * 60, "8" * 60, False),
    ],
)
def test_what_is_near_or_no_numeral_is_left_to_math_verify(gold, answer, verdict):
    assert quick_verdict(gold, answer) is verdict


FORMS = ("{}", "({})", r"\text{{{}}}", r"\text{{({})}}", r"\mathrm{{{}}}", r"\textbf{{{}}}", r"\textbf{{({})}}", " {} ")


def letters(forms, alphabet=string.ascii_letters):
    return [form.format(letter) for letter in alphabet for form in forms]


def test_single_letters_are_compared_as_math_verify_does():
    numbers = ["1", "0", "-3", "0.5", r"\frac{1}{2}", "1,000", "2.718282"]
    texts = letters(FORMS, "aBXxeI")
    assert compare([*itertools.product(texts, numbers), *itertools.product(numbers, texts)]) > 0  # e and i are asked
    assert not any(listed(a, b, True) for a, b in itertools.product(texts, texts))
    compare(itertools.product(texts, texts))
    assert quick_verdict("A", r"\text{(a)}") is True


def test_the_same_text():
    assert same_text("x", "x")
    assert same_text("a b", " a \n\t b")
    assert not same_text("a b", "ab")
    assert not same_text("$ $", "$ $")
    assert same_text("x" * 10**6, "x" * 10**6)


@pytest.mark.parametrize(
    "text", ["x", r"\frac{1}", "((((1", "1,", "a ? b", r"\text{}x", "5.", r"\infty", "=2", "x=", r"\sqrt", "^2", "²"]
)
def test_math_verify_finds_every_text_equal_to_itself(text):
    assert same_text(text, text)
    assert math_verify(text, text)


def test_a_list_of_golds_is_one_of_them_and_a_list_in_a_gold_is_all_of_them(reward):
    golds = ["x+1", "7", r"so \boxed{\frac{1}{2}}"]
    answers = [r"\boxed{1+x}", r"\boxed{7}", r"\boxed{0.5}", r"\boxed{8}", r"\boxed{x+2}", "none"]
    assert reward([], answers, [golds] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert reward([], [r"\boxed{2, 1}", r"\boxed{1}"], ["1, 2"] * 2) == [1.0, 0.0]
    assert reward([], [r"\boxed{1}"] * 3, [["", "1"], ["", "2"], [""]]) == [1.0, 0.0, None]
    assert reward.check_golds([["", "7"], [""], [], ["None"], "7", 7, 7.5, None, ("1", "2")]) == [1, 2, 3, 7]
    assert gold_answers(["1", [r"\boxed{2}"], "1"]) == ("1", "2")


def test_numerals_need_no_worker_and_the_rest_one_task_a_pair(reward, monkeypatch):
    asked = []
    run = reward._pool.run
    monkeypatch.setattr(reward._pool, "run", lambda tasks, **given: asked.extend(tasks) or run(tasks, **given))
    golds = ["7", "1/2", "B", "x^2", "(1,2)", "3"]
    answers = ["8", "0.5", "C", r"x \cdot x", "(1,2)", "(" * 40 + "3" + ")" * 40]
    metrics = {}
    for _ in range(2):
        completions = [rf"\boxed{{{a}}}" for a in answers] * 3
        assert reward([], completions, golds * 3, metrics.__setitem__) == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0] * 3
    assert [(task["gold"], task["answer"]) for task in asked] == [("x^2", r"x \cdot x")]
    unhurt = dict.fromkeys((f"reward/{name}" for name in ("no_box", "timeout", "infrastructure", "over_budget")), 0.0)
    unhurt |= {f"reward/rejected/{kind}": 0.0 for kind in REJECTED}
    assert metrics == {**unhurt, "reward/screened": 1 / 6, "reward/rejected/unequal": 2 / 6}


@pytest.mark.parametrize(("gold", "answer"), [("3", "٣"), (r"\frac{1}{8}", "\\fra\tc{1}{8}"), ("12", "1 2")])
def test_what_only_looks_like_a_numeral_is_left_to_math_verify(gold, answer):
    assert quick_verdict(gold, answer) is None
    assert grade(gold, answer) != "right"
