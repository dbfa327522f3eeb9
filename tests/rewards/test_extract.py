r"""Finding the last balanced \boxed{}."""

import random
import re
import time
from fractions import Fraction

import pytest

from basis_rl.rewards.extract import completion_text, last_boxed, plain_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed {4}", "4"),
        (r"\fbox{5}", "5"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{ open \boxed{8}", "8"),
        (r"{ stray \boxed{9} } }", "9"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed{}", ""),
        *((text, None) for text in ("7", "", "\\", r"\boxed{6", r"\\boxed{1}")),  # the last: a line break and a word
        (r"{ \\\boxed{1} }", "1"),
        (r"\boxed 5.", "5"),
        (r"\boxed 5000\,000", None),
        (r"$\boxed 1,000$", "1,000"),
        (r"\boxed 12\,000\)", r"12\,000"),
        (r"\boxed -2.5 \text{ cm}", "-2.5"),
        (r"\boxed{1} and \boxed 5/6", "1"),
        *[
            (rf"\boxed 5{rest}", None)
            for rest in ("/6", " + 3", r"\frac12", "^{10}", "x", "!", r"\cdot 3", "5,5,", ".5.5", " 000")
        ],
    ],
)
def test_last_balanced_box(text, expected):
    assert last_boxed(text) == expected


def test_nothing_before_the_first_box_matters(monkeypatch):
    rng = random.Random(0)
    pieces = ["\\", "{", "}", r"\boxed{", r"\fbox {", "7", " so far, many words later ", r"\{", r"\}"]
    texts = ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(5_000)]
    found = [last_boxed(text) for text in texts]
    assert len(set(found)) > 50
    monkeypatch.setattr("basis_rl.rewards.extract._BOX", re.compile(""))  # from the first character on
    assert [last_boxed(text) for text in texts] == found


PIECES = ["\\", r"\boxed{", r"\[ \boxed{1} ", "{", "}", r"\boxed{1}", r"\boxed   ", r"\boxed 5 "]


# A repetition loop of a model, or a long numeral without braces: quadratic scanning would take minutes here.
@pytest.mark.parametrize(
    "text",
    [*(piece * 200_000 for piece in PIECES), *(rf"\boxed {piece * 100_000}x" for piece in ("9", "999,", "9.", "9,"))],
    ids=lambda text: text[:20],
)
def test_linear_in_the_length(text):
    began = time.thread_time()
    last_boxed(text)
    assert time.thread_time() - began < 5


def test_completion_text():
    assert completion_text("abc") == "abc"
    talk = [{"role": role, "content": text} for role, text in (("assistant", "1"), ("tool", "2"), ("assistant", "3"))]
    assert completion_text(talk) == "3"
    assert completion_text([{"role": "assistant", "content": None}]) == ""
    assert completion_text([]) == ""


NO_NUMERALS = [
    "5$ $6", "5$6", r"5\,6", "1 , 000", "3 1/2", "1,00", "1,2", "(1)", "3x", "1/0", ".", "", "1e9999", "9" * 100, "--1",
    r"\frac{1}{x}", r"2\frac{1}{3}", r"2\,\frac{1}{3}", r"\frac{3}{4}5", r"\frac{1}{2}e3", r"1\ 2", r"1 \; 2", "1  2",
    "1\n 2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("7", 7),
        ("-1,000", -1000),
        ("1{,}000", 1000),
        ("27.0", 27),
        (" $.5$ ", Fraction(1, 2)),
        ("-$5", -5),
        ("- $5$", -5),
        ("3/4", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("-1./3", Fraction(-1, 3)),
        (r"8.7 \times 10^{8}", 870_000_000),
        (r"8.7\cdot10^8", 870_000_000),
        ("1e-3", Fraction(1, 1000)),
        (r"10,\!080", 10080),
        (r"10\,000", 10000),
        *((text, None) for text in NO_NUMERALS),
    ],
)
def test_numerals_have_their_exact_value(answer, value):
    assert plain_number(answer) == value
