r"""Normal forms, readings that are refused, and what both come to in verdicts; golds that are prose or misread."""

import logging

import pytest

from basis_rl.rewards.math.notation import normal_form, text_form
from basis_rl.rewards.math.reading import hedged, refused_reading
from tests.rewards.growth import seconds
from tests.rewards.math.test_rules import pairs, rows


def score(reward, gold, completion):
    return reward([], [completion if r"\boxed" in completion else rf"\boxed{{{completion}}}"], [gold])[0]


@pytest.mark.parametrize(("gold", "answer"), pairs("right"))
def test_right_answers_in_other_notations(gold, answer, reward):
    assert score(reward, gold, answer) == 1.0


@pytest.mark.parametrize(("gold", "answer"), [*pairs("wrong"), ("1.41", r"\sqrt{2} \approx 1.41")])
def test_free_points_are_none(gold, answer, reward):
    assert score(reward, gold, answer) == 0.0


@pytest.mark.parametrize(("gold", "right", "wrong"), rows("golds"))
def test_golds_are_graded_as_what_they_say(gold, right, wrong, reward):
    assert score(reward, gold, right) == 1.0
    assert score(reward, gold, wrong) == 0.0


def test_prose_and_misread_golds_are_named(reward, caplog):
    golds = ["7", "?", "seven ? eight", "2x^2 + 3y^2 = d", "", "x+1", r"1, 2, \ldots, 9", "6m", ["7", "1 2 3"]]
    assert reward.gold_notes(golds) == {2: "prose", 3: "misread", 6: "prose", 7: "misread", 8: "prose"}
    others = [r"8\!:\!34 \text{ p.m.}", r"m c^{2}\left(\gamma^{2}-1\right) \sin ^{2} \theta", r"\Gamma(-1)", "3:2"]
    assert reward.gold_notes(others) == {0: "misread", 1: "misread", 2: "prose"}
    with caplog.at_level(logging.WARNING):
        assert reward.check_golds(golds) == [1, 4]
    (record,) = caplog.records
    assert "5 of 9 golds" in record.message
    assert "row 3, misread: '2x^2 + 3y^2 = d'" in record.message
    caplog.clear()
    assert reward.check_golds(["7", "x+1", r"5\text{ cm}"]) == []
    assert not caplog.records


@pytest.mark.parametrize(
    "text",
    [
        "1 2 3", "12 000 5", "100, 200", "1,200, 2,000", "x=1,2", "(1,200,300)", "1.5 000", "2**3*4", "$5$ and $6$",
        r"11\text{ a.m.}", "1,2,...", r"\log_{2}(8)", "x^2(3)", "5/6 7/8", "3 7/4", r"\text{or} 5", r"5\text{ or }",
        "n! = 120", "x" * 10_001 + " ",
    ],
)  # fmt: skip
def test_what_is_no_other_notation_stays(text):
    assert normal_form(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "5x", r"2\frac{1}{2}", r"\frac12", r"\frac{1}2", r"\frac{29}4", r"\sqrt[3]{2}", r"\log_2 8", r"\sin^2 30",
        "10!", r"5\text{ cm}", r"3\text{ and }5", r"\text{(A)}", "4210_{5}", r"e^{2\pi i}", r"\sum_{n=1}^{5} 3",
        r"2 \sqrt 3", r"\overline{15}", r"\sqrt{2}{x}", r"\log_{2}{8}", "||x|-3|", "2|x|", "-{5}", "P(A|3)",
        "(n-2) 2^{n}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"90^\circ", r"50\%", r"(-\infty, 3]", "x^2 y",
    ],
)  # fmt: skip
def test_formulas_are_read(text):
    assert refused_reading(normal_form(text)) is None


BESIDE = [
    r"\frac{1 2}{3}", r"\sqrt{1 2}", "x^{1 2}", r"\text{A} x", r"x=5 \quad y=3", r"45^\circ 30'", r"5$ $6", "5 in 6",
    "|5|6", "{5}{6}",
]  # fmt: skip
OTHERS = [
    (r"5\text{ is wrong}", "unit"),
    ("1, 2, ...", "dots"),
    (r"\{x \mid x = 4\}", "builder"),
    (r"5\frac{3}{2}", "improper"),
]


@pytest.mark.parametrize(("text", "reason"), [*((text, "beside") for text in BESIDE), *OTHERS])
def test_what_stands_side_by_side_is_no_formula(text, reason):
    assert refused_reading(normal_form(text)) == reason


def test_texts_compare_without_blanks_that_change_nothing():
    assert text_form("E_{1} , E_{2}") == text_form("E_1,E_2")
    assert text_form("1 2") != text_form("12")
    assert text_form("x^{12}") != text_form("x^12")


PIECES = ("1 ", "1 000 ", "**", r"\text{", r"\frac", "{", "^{", "_{", r"\quad ", "√(", "1,000", ",", "~", r"\{:", "'")


@pytest.mark.parametrize("work", [normal_form, refused_reading, lambda text: hedged("5", text), text_form])
def test_time_is_bounded_for_the_longest_text_that_is_read(work):
    for piece in PIECES:
        assert seconds(lambda size, piece=piece: work((piece * size)[:size]), 10_000) < 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "denied"),
    [
        ("5", "not x=5", True),
        ("5", "isn’t = 5", True),
        ("5", r"\textbf{Not} = 5", True),
        ("5", r"\not\approx 5", True),
        (r"\text{no solution}", "no solution", False),
        (r"\text{no solution}", r"\text{not a solution}", True),
        (r"\text{not prime}", "5", False),
        ("notx", "notx", False),
        ("x", r"\nu x", False),
        (r"\text{north}", r"\text{North}", False),
        (r"\text{a or b}", r"\text{A or b}", False),
    ],
)
def test_what_the_gold_does_not_deny_may_not_be_denied(gold, answer, denied):
    assert hedged(gold, answer) is denied
