r"""Normal forms, readings that are refused, and what both come to in verdicts; golds that are prose or misread."""

import logging

import pytest

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.reading import hedged, normal_form, refused_reading, text_form
from basis_rl.rewards.math.screen import LIMITS
from tests.rewards.growth import seconds


@pytest.fixture(scope="module")
def reward():
    reward = MathVerifyReward(num_workers=1, timeout=3.0)
    yield reward
    reward.close()


def score(reward, gold, completion):
    return reward([], [completion if r"\boxed" in completion else rf"\boxed{{{completion}}}"], [gold])[0]


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        *[("12000", text) for text in (r"\$12\,000", r"x=12\,000", "12 000", "12{,}000", r"12,\!000", "12~000")],
        *[("42", text) for text in ("**42**", r"\mathbf{42}", r"\textbf{42}", r"\text{42}", "42.", r"\ 42\ ", "$42$")],
        *[("42", text) for text in (r"\(42\)", "`42`", r"\boxed 42", r"So \boxed42.", r"\bm{42}", r"\quad 42", "€42")],
        ("13535", "13 535"),
        ("1234567", "1 234 567"),
        ("1000", "x=1,000"),
        ("-13535", "−13 535"),
        (r"\sqrt{5}", "√5"),
        (r"\sqrt{x+1}", "√(x+1)"),
        (r"\frac{3}{2}", "1 1/2"),
        (r"\frac{31}{4}", r"7 3/4 \text{ cups}"),
        (r"\emptyset", r"\varnothing"),
        (r"\emptyset", "∅"),
        ("8", "2(4)"),
        (r"2\pi", "2π"),
        ("10^3x", r"1000 \cdot x"),
        ("6, 8, 10", r"6, 8\text{, and }10"),
        ("3, 5", r"$3$\text{, or }$5$"),
        (r"\text{not a prime}", r"\text{not  a prime}."),
        (r"\text{Neither}", r"\text{neither}"),
        *[("5", rf"\text{{{name}}} = 5") for name in ("No. of ways", "Day 3", "3 apples")],
        ("120", "5! = 120"),
        (r"\$5", r"x = \$5"),
        (r"12\text{ m}\cdot\text{s}^{-1}", "12"),
        (r"15\text{ cm$^{2}$}", "15"),
        ("1, 2", r"\boxed{1} and \boxed{2}"),
        ("2, 3, 5", r"$$\boxed{2}, \boxed{3}, \boxed{5}$$"),
        ("(2,2), (6,2)", r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$"),
        ("5", r"x = 2 + 3 = 5"),
        (r"\pi", r"\pi \approx 3.14"),
        ("7465", r"7465 \approx 7500"),
        ("1.41", r"\sqrt{2} \approx 1.41"),
    ],
)
def test_right_answers_in_other_notations(gold, answer, reward):
    expected = 0.0 if (gold, answer) == ("1.41", r"\sqrt{2} \approx 1.41") else 1.0  # the left side is the answer
    assert score(reward, gold, answer) == expected


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        *[("0", text) for text in (r"\text{I give up, } 0", r"25 \quad 0", "12 000", r"\$12\,000", "0 I give up")],
        *[("0", text) for text in (r"0 \cdot a", r"\text{no} \cdot 0", "0.0000001", "x 0", r"5\text{ cm }0", "A) 0")],
        ("6", "1 2 3"),
        ("548", "13 535"),
        ("13", "5 8"),
        ("13", r"5\frac{8}{1}"),
        ("12", "It is not 12"),
        ("12", "about 12?"),
        ("12", r"12 \text{ or not}"),
        ("12", r"12 \text{ (or 13)}"),
        ("8", "x = 7 = 8"),
        ("2x", "7 = 2x"),
        ("0", "0=0"),
        ("7", r"7 \approx 8"),
        ("5", r"5 \approx 0"),
        ("5", "5 ~= 7"),
        ("9600", r"9600 \approx 9640"),
        ("2x", r"2x \approx 8"),
        ("5", "[5, 5]"),
        ("5", r"[5, 4) \cup \{5\}"),
        (r"1.6 \times 10^{-19}", "0.0"),
        ("x=5", r"x = 5 \cdot \frac{a}{a}"),
        *[
            (r"\approx 8.24\text{ mph}", rf"{no} \approx 8.24")
            for no in ("not", r"\text{not}", r"\not", r"\text{7 or}")
        ],
        *[
            ("5", f"{no} = 5")
            for no in ("not", "isn't", "never", "I give up", r"\text{maybe}", r"\text{7 or}", r"x \not")
        ],
        *[("5", f"{no} x = 5") for no in ("not", "no", "if", r"\neg", r"\nexists")],
        *[("5", f"x {unequal} 5") for unequal in (r"\not=", "!=", "=/=", r"\not\approx", "isn't", "is not")],
        *[("0,-1", rf"7{between}$0,-1$") for between in (r"\ ", " ", "~", "$ $", r"\text{ } ", r"\, ")],
        *[("$0,-1$", rf"\text{{{hedge}}} $0,-1$") for hedge in ("7 or ", "I give up, ", "maybe")],
        ("$x=0,1$", "not $x=0,1$"),
        *[("1, 2, 4", rf"$1$, $2$, $3$ {hedge} $4$") for hedge in ("or maybe", r"\text{ or maybe }", "not", r"\ ")],
        *[("56", f"5{beside}6") for beside in ("$ $", " $ ", '"', r"\$", "€")],
        *[("11", f"5{beside}6") for beside in (r" \- ", r"\*", r"\=", r" \and ", r"\text{ }", r"\hfil ", "\\\n")],
        *[("0", rf"{{87}}{beside}{{0}}") for beside in ("", "e", r"\hfil", "!")],
        ("0", "|87| 0"),
        *[
            ("5", rf"5\text{{ {word}}}")
            for word in ("probably", "minus one", "rejected", "plus one", "isn't it", "etc.")
        ],
        *[("5", rf"5\text{{ cm}}{beside}") for beside in (r" + {x}", r", \{\}", r"\cdot\sqrt{x}")],
        ("4", r"\boxed{3} or \boxed{4}"),
        ("4", r"\boxed{3}, \boxed{4}"),
        ("4", r"\boxed{3}\boxed{4}"),
        ("x+3", "x+3d"),
    ],
)
def test_free_points_are_none(gold, answer, reward):
    assert score(reward, gold, answer) == 0.0


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("2x^2 + 3y^2 = d", "3y^2 + 2x^2 = d", "3"),
        ("6m", r"m \cdot 6", "6"),
        (r"\frac{1}{m} t", r"\frac{t}{m}", r"\frac{1}{m}"),
        ("2ab", "2ba", "2"),
        ("5 cm", "5", "6"),
        (r"\text{no solution}", r"\text{no  solution}.", "0"),
        (r"m\frac{dv}{dt}+bv=f", r"m \frac{dv}{dt} + b v = f", "bv=f"),
        (r"E_{1}, E_{2}", "E_1,E_2", "2"),
        (r"1, 2, \ldots, 9", r"1, 2, \ldots , 9", "1, 2, 9"),
        ("seven ? eight", "seven  ? eight", "8"),
        ("(n-2) 2^{n}+1", r"2^n(n-2)+1", "3"),
        ("$N=n$", "N = n", "N=n-3542"),  # n = n to the parser, and n = n - 3542 is as true or false as that
        ("$N=n$", "$N = n$.", "$N=n$ + 3542"),
    ],
)
def test_golds_are_graded_as_what_they_say(gold, right, wrong, reward):
    assert score(reward, gold, right) == 1.0
    assert score(reward, gold, wrong) == 0.0


def test_prose_and_misread_golds_are_named(reward, caplog):
    golds = ["7", "?", "seven ? eight", "2x^2 + 3y^2 = d", "", "x+1", r"1, 2, \ldots, 9", "6m", ["7", "1 2 3"]]
    assert reward.gold_notes(golds) == {2: "prose", 3: "misread", 6: "prose", 7: "misread", 8: "prose"}
    with caplog.at_level(logging.WARNING):
        assert reward.check_golds(golds) == [1, 4]
    (record,) = caplog.records
    assert "5 of 9 golds" in record.message
    assert "row 3, misread: '2x^2 + 3y^2 = d'" in record.message
    caplog.clear()
    assert reward.check_golds(["7", "x+1", r"5\text{ cm}"]) == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("1 2 3", "1 2 3"),
        ("12 000 5", "12 000 5"),
        ("100, 200", "100, 200"),
        ("1,000, 2,000", "1,000, 2,000"),
        ("x=1,2", "x=1,2"),
        ("(1,200,300)", "(1,200,300)"),
        ("1.5 000", "1.5 000"),
        ("2**3*4", "2**3*4"),
        ("$5$ and $6$", "$5$ and $6$"),
        (r"11\text{ a.m.}", r"11\text{ a.m.}"),
        ("1,2,...", "1,2,..."),
        (r"\log_{2}(8)", r"\log_{2}(8)"),
        ("x^2(3)", "x^2(3)"),
        ("5/6 7/8", "5/6 7/8"),
        ("3 7/4", "3 7/4"),
        (r"\text{or} 5", r"\text{or} 5"),
        (r"5\text{ or }", r"5\text{ or }"),
        ("n! = 120", "n! = 120"),
        ("x" * 10_001 + " ", "x" * 10_001 + " "),
    ],
)
def test_what_is_no_other_notation_stays(text, form):
    assert normal_form(text) == form
    assert normal_form(form) == form


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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"\frac{1 2}{3}", "beside"),
        (r"\sqrt{1 2}", "beside"),
        ("x^{1 2}", "beside"),
        (r"\text{A} x", "beside"),
        (r"x=5 \quad y=3", "beside"),
        (r"45^\circ 30'", "beside"),
        (r"5\text{ is wrong}", "unit"),
        ("1, 2, ...", "dots"),
        (r"5$ $6", "beside"),
        ("5 in 6", "beside"),
        ("|5|6", "beside"),
        ("{5}{6}", "beside"),
        (r"\{x \mid x = 4\}", "builder"),
        (r"5\frac{3}{2}", "improper"),
    ],
)
def test_what_stands_side_by_side_is_no_formula(text, reason):
    assert refused_reading(normal_form(text)) == reason


def test_texts_compare_without_blanks_that_change_nothing():
    assert text_form("E_{1} , E_{2}") == text_form("E_1,E_2")
    assert text_form("1 2") != text_form("12")
    assert text_form("x^{12}") != text_form("x^12")


@pytest.mark.parametrize("piece", ["1 ", "1 000 ", "**", r"\text{", r"\frac", "{", "^{", r"\quad ", "√(", "1,000"])
@pytest.mark.parametrize("work", [normal_form, refused_reading])
def test_time_is_bounded_for_the_longest_text_that_is_read(piece, work):
    longest = 2 * LIMITS["length"]
    assert seconds(lambda size: work((piece * size)[:size]), longest) < 3.0


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
