r"""Finding the last balanced \boxed{}."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from basis_rl.rewards.extract import completion_text, is_blank, last_boxed, plain_number, take_answer

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())


@pytest.mark.parametrize(("text", "expected"), CASES["boxes"])
def test_last_balanced_box(text, expected):
    assert last_boxed(text) == expected


BLANKS = [
    "",
    " \n",
    "\u200b",
    "\u00a0\u3000",
    "\ufeff\u2060\u00ad",
    "\u2800",
    "\u3164\u115f",
    "\x00\x7f",
    "\u202e",
    "\ufe0f",
]


@pytest.mark.parametrize("blank", BLANKS)
def test_a_text_in_which_nothing_is_seen_is_no_answer(blank):
    assert is_blank(blank)
    assert not is_blank(f"{blank}0{blank}")
    places = {
        "box": rf"\boxed{{{blank}}}",
        "tag": f"<answer>{blank}</answer>",
        "hashes": f"#### {blank}",
        "whole": blank,
    }
    for where, text in places.items():
        assert take_answer(text, where) is None
    assert all(is_blank(text) is False for text in (".", "-", "{}", "~", "é", "答", "\ud800", "\U0001f642"))


def test_completion_text():
    assert completion_text("abc") == "abc"
    talk = [{"role": role, "content": text} for role, text in (("assistant", "1"), ("tool", "2"), ("assistant", "3"))]
    assert completion_text(talk) == "3"
    assert completion_text([{"role": "assistant", "content": None}]) == ""
    assert completion_text([]) == ""


@pytest.mark.parametrize(("answer", "value"), CASES["numerals"])
def test_numerals_have_their_exact_value(answer, value):
    assert plain_number(answer) == (None if value is None else Fraction(value))
