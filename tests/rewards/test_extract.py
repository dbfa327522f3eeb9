r"""Finding the last balanced \boxed{}."""

import time

import pytest

from basis_rl.rewards.extract import completion_text, last_boxed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed {4}", "4"),
        (r"\fbox{5}", "5"),
        (r"\boxed{6", None),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{ open \boxed{8}", "8"),
        (r"{ stray \boxed{9} } }", "9"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed{}", ""),
        ("7", None),
        ("", None),
        ("\\", None),
    ],
)
def test_last_balanced_box(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize("piece", [r"\boxed{", r"\[ \boxed{1} ", "{", "}", r"\boxed{1}", r"\boxed   "])
def test_linear_in_the_length(piece):
    # A repetition loop of a model: quadratic scanning would take minutes here.
    began = time.perf_counter()
    last_boxed(piece * 200_000)
    assert time.perf_counter() - began < 5


def test_completion_text():
    assert completion_text("abc") == "abc"
    talk = [
        {"role": "assistant", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "3"},
    ]
    assert completion_text(talk) == "3"
    assert completion_text([{"role": "assistant", "content": None}]) == ""
    assert completion_text([]) == ""
