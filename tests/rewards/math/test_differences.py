"""Every difference to Math-Verify has a row in docs/rewards.md: its own cases, rewritings, hedges, hacks."""

import json
import random
import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
from math_verify import parse, verify

from basis_rl.rewards.extract import last_boxed, plain_number
from basis_rl.rewards.math.grading import _apart, _equal, _gold_reading, _readings, _unsound, grade, misread
from basis_rl.rewards.math.notation import normal_form, text_form
from basis_rl.rewards.math.quick import quick_verdict, same_ratio, same_text, same_time
from basis_rl.rewards.math.reading import hedged, primes_differ, refused_reading
from basis_rl.rewards.math.screen import screened
from benchmarks.reward.cases import FEW
from benchmarks.reward.hacking import FEW_AND_HARD, pairs
from tests.rewards.math.test_rules import BOXES, DIFFERENCES

CASES = Path(__file__).with_name("math_verify_cases.json")


@cache
def parsed(text):
    return parse(rf"\boxed{{{text}}}", parsing_timeout=None)


def math_verify(gold, answer):
    return bool(verify(parsed(gold), parsed(answer), timeout_seconds=None))


def verdict(gold, answer):
    """Right or not, as the reward decides, but in this process."""
    if same_text(gold, answer) or screened(gold, answer):
        return same_text(gold, answer)
    gold, answer = normal_form(gold), normal_form(answer)
    if same_text(text_form(gold), text_form(answer)):
        return True
    quick = same_time(gold, answer)
    quick = quick_verdict(gold, answer) if quick is None else quick
    quick = same_ratio(gold, answer) if quick is None else quick
    if quick is None and (refused_reading(gold) or refused_reading(answer)):
        return False
    if quick is None and (hedged(gold, answer) or primes_differ(gold, answer)):
        return False
    return bool(grade(gold, answer)) if quick is None else quick


REFUSED = {"unit": "no_unit", "dots": "dots", "builder": "builder", "improper": "improper"}
UNSOUND = {
    "chain": "chain",
    "interval": "point_interval",
    "infinity": "closed_infinity",
    "currency": "other_currency",
    "approximation": "far_approximation",
    "symbol": "any_symbol",
    "near": "small_numbers",
}
SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad)"
# How the notations look that `normal_form` reads: each row explains only what looks like it.
NOTATIONS = {
    "spaced_thousands": rf"\d(?:{SPACE}|\{{,\}})+\d{{3}}(?!\d)",
    "assigned_thousands": r"=\s*[-+]?\d{1,3},\d{3}",
    "listed_thousands": r"[1-9]\d{0,2},0\d\d(?!\d)",
    "braced_thousands": r"\{\d{1,3},(?:\\!)?\d{3}",
    "signed_thousands": r"^\s*\+\d{1,3},\d{3}",
    "markdown": r"^\W*(?:\*\*?|__|`)\S.*(?:\*\*?|__|`)\W*$",
    "root_sign": "√",
    "mixed_number": r"\d\s+\d+\s*/\s*\d",
    "empty_set": r"\\varnothing|∅",
    "product": rf"\d{SPACE}*(?:\\left)?\(",
    "product_of_brackets": r"\d\)\s*\(",
    "colour": r"\\(?:text)?color",
    "sizes": r"\\[bB]igg?",
    "matrix_rows": r"\\\\\s*(?:\[|\\end)",
    "sign_of_currency": "[€£¥]",
    "unicode": r"[^\x00-\x7f]",
    "degree_command": r"\\degree",
    "repeating": r"\.\d*\\(?:overline|bar|dot)",
    "counted": rf"\d{SPACE}+[a-z]{{3,}}",
    "speed": r"\d\s+[a-z]+/[a-z]+",
    "ordinal": r"\d\s*\^\s*\{?(?:\\\w+\{)?(?:st|nd|rd|th)",
    "letter_in_font": r"\\(?:math|text)\w*\s*\{\s*(?:[a-zA-Z]|\\?pi)\s*\}",
    "spaced_i": rf"\d(?:{SPACE}|\\cdot|\*)+i(?![a-zA-Z])",
    "text_name": r"^\s*\\text\{[^{}]*\}\s*=.*\\text",
    "percent_in_text": r"\\text\{\s*(?:percent|\\?%)",
    "assigned_e": r"\d[eE][-+]?\d",
    "quotient_point": r"\d\./\d",
    "times_x": r"\dx?\s+x\s+10",
    "tilde": "~",
    "index": r"_\s*\{\s*\\",
    "gamma": r"\\gamma",
    "stop_in_text": r"\.\s*\}",
    "text_in_list": r"\\(?:text|mbox)\s*\{[\s,;]*(?:and|or|,|;)",
    "full_stop": r"[.,;]\W*$",
    "factorial_equals": r"\d!=",
    "square_unit": r"\d\s*(?:[ckd]?m|ft|yd)\s*\^",
    "product_sized": r"\)\s*\\left\s*\(",
    "product_of_binomials": r"\\binom.*\\binom",
    "imaginary": r"i\s*\\sqrt|\}\s*i(?![a-z])",
    "complex_square": r"\([^()]*i[^()]*\)\s*\^",
    "inequality": r"[<>]|\\[lg]eq?(?![a-z])",
    "braces": r"^\W*?(?:\\(?:math|text|bold|under)\w*\s*)?(?<!\\)\{.*(?<!\\)\}\W*$",
}


# These are read by the worker.
GRADED = (
    "gamma", "text_name", "sign_of_currency", "product_sized", "product_of_binomials", "imaginary", "complex_square",
    "inequality",
)  # fmt: skip


def notation(*texts):
    """The row of a notation that one of the texts has."""
    return next((name for name, look in NOTATIONS.items() if any(re.search(look, text) for text in texts)), None)


def row(gold, answer, here):
    """The row of the table that says why the verdict is not Math-Verify's; None if there is none."""
    if screened(gold, answer):
        return "screened"
    forms = normal_form(gold), normal_form(answer)
    return row_of_right(gold, answer, forms) if here else row_of_wrong(gold, answer, forms)


def row_of_wrong(gold, answer, forms):
    for form in forms:
        if reason := refused_reading(form):
            return REFUSED.get(reason) or row_of_beside(form)
    if hedged(*forms):
        return "denied"
    if primes_differ(*forms):
        return "prime"
    if same_ratio(*forms) is not None:
        return "three_parts"
    if same_time(*forms) is not None:
        return "time"
    if None not in map(plain_number, forms):
        return "small_numbers" if "." in gold + answer else "e_product"
    if forms != (gold, answer) and not math_verify(*forms):  # the notation is read, and is something else
        return {"letter_in_font": "letter_is_no_unit"}.get(notation(gold, answer), "thin_space_product")
    expected, found = _gold_reading(forms[0]), _readings(forms[1])
    if expected is None or not found:
        return "prose"
    reasons = [_unsound(expected, reading, *forms) for reading in found if _equal(expected, reading)]
    if reasons:
        return UNSOUND.get(reasons[0])
    if not re.search(r"\d|\\pi|\\infty", forms[1]):
        return "unit_of_nothing"
    return "gold_tail" if misread(forms[0]) or misread(forms[1]) else None


def row_of_beside(form):
    """Which of the rows of what stands side by side: what they look like."""
    looks = {
        "cell": r"\\begin",
        "behind_a_space": r"\\q?quad|\n|\\\\",
        "text_beside": r"\\(?:text|mbox|math)\w*\s*\{",
        "dollars_beside": r"\$",
        "quotation_mark": r"['\"]",
        "constant_beside": r"[a-zA-Z]\W*\d",
        "group_beside": r"[)}\]|]\W*\d",
        "number_beside": r"\d\W+\d|\d\W*[a-zA-Z]",
    }
    return next((name for name, look in looks.items() if re.search(look, form)), None)


def row_of_right(gold, answer, forms):
    if same_text(gold, answer) or same_text(*map(text_form, forms)):
        return "same_text"
    found = notation(gold, answer)
    found = found if forms != (gold, answer) or found in GRADED else None
    if found is None and None not in map(plain_number, forms):
        return "scientific"
    return found or ("gold_tail" if misread(gold) else None)


def unlisted(cases):
    """Pairs whose verdicts differ without a row."""
    found = []
    for gold, answer in cases:
        here = verdict(gold, answer)
        if here != math_verify(gold, answer):
            why = DIFFERENCES.get(row(gold, answer, here))
            if why is None or why.here != here:  # what is right in Math-Verify and refused here has rows of its own
                found.append((gold, answer, here))
    return found


def test_every_reason_has_a_row():
    assert {*REFUSED.values(), *UNSOUND.values()} <= set(DIFFERENCES)
    assert all(DIFFERENCES[name].here for name in NOTATIONS)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_row_has_a_row_of_its_kind(name):
    """The example of a row is explained by it, or by one that looks like it; without the rows it is a find."""
    difference = DIFFERENCES[name]
    if difference.math_verify is not None:
        assert unlisted([(difference.gold, difference.answer)]) == []
    if name in NOTATIONS:
        assert re.search(NOTATIONS[name], f"{difference.gold}\n{difference.answer}", re.MULTILINE)
        assert not {gold for gold in FEW if notation(gold)} - {r"\text{east}", "1,000"}


ROLLOUTS = [
    r"\boxed{V}", r"So \boxed{N}, \boxed{V}.", r"\boxed{V} and \boxed{N}", r"\boxed{N} is wrong, so \boxed{V}",
    r"\boxed{N}. After a long calculation we find instead: \boxed{V}.", r"$\boxed V$.", r"\boxed{V", r"\fbox{V}",
    r"\boxed{N} \quad \text{or} \quad \boxed{V}", r"\boxed{\boxed{V}}", "no box: V", r"\boxed{N}\\\boxed{V}",
    r"\boxed{V} \boxed{V}", r"\boxed V/N",
]  # fmt: skip


def row_of_rollout(gold, rollout, here):
    """As `row`, for a whole rollout: which boxes are taken first."""
    answer = last_boxed(rollout)
    if answer is None:
        return "part_of_a_formula" if re.search(r"boxed [^{]", rollout) else "no_box"
    if here and rollout.count("boxed") > 1 and "," not in answer:
        return "last_box"
    return row(gold, answer, here)


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_whole_rollouts(shape):
    rows = DIFFERENCES | BOXES
    for gold in ("7", "0", r"\frac{1}{2}", r"\text{(C)}"):
        rollout = shape.replace("V", gold).replace("N", "1234")
        answer = last_boxed(rollout)
        here = answer is not None and verdict(gold, answer)
        there = bool(verify(parsed(gold), parse(rollout, parsing_timeout=None), timeout_seconds=None))
        if here != there:
            why = rows.get(row_of_rollout(gold, rollout, here))
            assert why is not None, (gold, rollout)
            assert why.here is here, (gold, rollout)


def test_a_difference_without_a_row_is_found(monkeypatch):
    monkeypatch.delitem(DIFFERENCES, "chain")
    assert unlisted([("8", "x = 7 = 8"), ("8", "x = 8")]) == [("8", "x = 7 = 8", False)]


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)])
def test_its_own_cases(every):
    assert unlisted(json.loads(CASES.read_text())["pairs"][::every]) == []


def rewritings(golds):
    """The golds as a model may write them, and near misses."""
    for gold in golds:
        yield from ((gold, form) for form in (f"${gold}$", f" {gold} .", f"**{gold}**", f"x = {gold}", f"{gold} cm"))
        yield from ((gold, form) for form in (gold.replace(r"\frac", r"\dfrac"), rf"\left({gold}\right)", f"-{gold}"))
        yield from ((gold, form) for form in (rf"\mathbf{{{gold}}}", rf"{gold}\text{{ units}}", f"{gold}, {gold}"))
        value = plain_number(gold)
        if value is not None:
            yield from (
                (gold, f"{float(value + shift):,.2f}") for shift in (Fraction(0), Fraction(1, 100), Fraction(1))
            )


def test_rewritings_of_golds():
    assert unlisted(list(rewritings(FEW))[::3]) == []


def hacks(golds, size):
    for _, gold, completion in pairs(golds, size, seed=5):
        answer = last_boxed(completion)
        if answer:
            yield gold.text, answer


def test_hedges_and_hacking_templates():
    assert unlisted(hacks(FEW_AND_HARD, 60)) == []


@pytest.mark.long
def test_rewritings_hedges_and_hacking_templates_of_real_golds(shared_data):
    golds = [json.loads(line)["answer"] for line in (shared_data / "math500.jsonl").read_text().splitlines()]
    golds = random.Random(1).sample(golds, 40)
    assert unlisted(rewritings(golds)) == []
    assert unlisted(hacks(golds, 1200)) == []


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
    readings = [reading for text in texts for reading in _readings(text)]
    apart = 0
    for one in readings:
        for other in readings:
            if _apart(one, other):
                apart += 1
                assert not verify(one, other, timeout_seconds=None), (one, other)
    assert 400 < apart < len(readings) ** 2 - 2 * len(readings)
