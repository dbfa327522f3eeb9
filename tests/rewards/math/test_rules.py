"""Quirks and differences: every row of the tables, allowed and refused, and the docs that show them."""

from pathlib import Path

import pytest
from math_verify import parse, verify

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.grading import grade
from basis_rl.rewards.math.notation import normal_form
from basis_rl.rewards.math.rules import QUIRKS, RULES, refused

DOCS = Path(__file__).resolve().parents[3] / "docs" / "rewards.md"


# Pairs whose verdict here is deliberately not Math-Verify's: a gold, and answers that are right here only.
RIGHT_HERE = [
    (r"8.7 \times 10^{8}", "870000000"),
    ("1000", "1e3", r"1\,000", "+1,000", "x=1,000"),
    ("7/3", r"\frac{7}{3.0}"),
    ("7", "7."),
    ("seven ? eight", "seven  ?  eight"),
    ("12000", "12 000", r"\$12\,000"),
    ("42", "**42**", "42."),
    ("13535", "13 535"),
    (r"\sqrt{5}", "√5"),
    (r"\frac{3}{2}", "1 1/2"),
    (r"\emptyset", r"\varnothing"),
    ("8", "2(4)"),
    ("40", "(5)(8)", r"\color{red}{40}", "40 dollars", "40 m/s", r"40^{\text{th}}", r"\text{cost}=40\text{ dollars}"),
    ("40", r"40~\text{units}"),
    ("(1,2)", "{(1,2)}", r"\bigl(1,2\bigr)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\[4pt]2\end{pmatrix}"),
    ("5", "€5"),
    ("x^2", "x²"),
    ("90", "90°"),
    (r"90^\circ", r"90\degree"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    ("1000, 2000", "1,000, 2,000"),
    (r"\dfrac{1}{29,\!322}", r"\frac{1}{29322}"),
    ("3i", r"3\mathrm{i}"),
    ("2+3i", "2+3 i"),
    (r"\frac{1}{2}", r"50\text{ percent}"),
    ("0.00085", "x=8.5e-4"),
    ("-1./3", r"-\frac13"),
    (r"6.02\times10^{23}", "6.02 x 10^{23}"),
    ("n^2-1", r"m_{\max}=n^2-1"),
    (r"m\left(\gamma^{2}-1\right)", r"(\gamma^2-1)m"),
    ("A", r"\text{A.}"),
    ("6, 8, 10", r"6, 8\text{, and }10"),
    ("20", r"(4)\left(5\right)"),
    ("1260", r"\binom{10}{4}\binom{4}{2}"),
    (r"-8-8 \sqrt{3} i", r"-8-8i\sqrt{3}"),
    ("3+4i", "(2+i)^2"),
    ("24", "4!=24"),
    (r"(-\infty,2)", "x<2"),
    ("2516_8", "(2516)_8", r"2516\text{ base }8"),
    (r"\text{B,C}", "B, C"),
    ("12", r"\text{Answer: }12", "12 cm^2", r"12\tag{1}"),
    (r"32\%", r"32\,\%"),
    ("0.5", r"\mathbb{P}(X>1)=\frac12"),
]
# A gold, and answers that are wrong here only.
WRONG_HERE = [
    ("1e3", "3e1"),
    ("0", r"1\,000", r"\text{I give up, } 0", r"25 \quad 0", "{87}{0}", "0 f(7)", r"0 \cdot a"),
    ("6", "1 2 3"),
    ("5", r"7\quad -2", r"\text{number who play neither} = 5", r"5\text{ six}", r"\text{six} = 5", "not x = 5"),
    ("5", r"5 \text{ or not}", r"5\text{ cm} + {x}", "[5, 5]", "5ab"),
    (r"\begin{pmatrix}6&1\end{pmatrix}", r"\begin{pmatrix}1 2 3&1\end{pmatrix}"),
    ("3", r"3\mathrm{i}"),
    (r"3\pi", r"\pi 3"),
    (r"\text{A}", "A cm"),
    ("0, -1", "7 $0, -1$"),
    ("56", '5"6'),
    (r"\approx 8.24 \text{ mph}", r"not \approx 8.24 \text{ mph}"),
    ("13", r"5\frac{8}{1}"),
    ("12", "about 12?", r"12\text{ m}\cdot\sqrt{\pi}"),
    ("1,9", r"1,\ldots,9"),
    ("4", r"\{x : x = 4\}"),
    ("x^2", "2x=x^2", "(x^2)'"),
    ("8", "x = 7 = 8"),
    ("2", "3=2"),
    ("7", r"7 \approx 8"),
    (r"1.6 \times 10^{-19}", "0.0"),
    (r"x=\$18.90", "x=€18.90"),
    (r"(-\infty,\infty)", r"[-\infty, \infty]"),
    (r"(-\infty,2)", r"\{-\infty,2\}"),
    ("8:34", r"\frac{4}{17}"),
    ("2x^2 + 3y^2 = d", "3"),
    ("6m", "6"),
    ("9", r"(4)\left(5\right)"),
    ("1:2:3", "1:6"),
    (r"4\!:\!51\!:\!06 \text{ p.m.}", "4:06:51"),
    ("1<x<2", r"\{1,2\}"),
    (r"-\frac{3}{8}", r"-\frac{3}{8" * 31),
]
# A gold and a rollout, whose boxes Math-Verify finds otherwise, and whether it is right here.
BOXES = [
    ("2", r"\boxed{1} is wrong, so \boxed{2}", True),
    ("7", "no box: 7", False),
    (r"\frac{5}{6}", r"\boxed 5/6", False),
]


# Right answers that score 0: (gold, answer).
LOST = [
    ("(A)", "(A) 5"),
    (r"(-\infty,-1)\cup(3,\infty)", r"x<-1 \text{ or } x>3"),
    (r"1\pm\sqrt{2}", r"\frac{2\pm\sqrt{8}}{2}"),
    ("(1,2)", r"\begin{cases}x=1\\y=2\end{cases}"),
    ("12", "12 L"),
    ("12", r"\max f(x) = 12"),
    (r"33\frac{1}{3}\%", r"\frac{100}{3}\%"),
]


def boxed(text):
    return rf"\boxed{{{text}}}"


def pairs(table):
    return [(gold, answer) for gold, *answers in table for answer in answers]


# More acceptances, by the quirk that each rests on: (gold, answer).
MORE = {
    "percent_as_fraction": [(r"\frac{1}{2}", "50 percent"), (r"50\%", r"\frac{1}{2}"), ("50", r"5000\%")],
    "percent_as_number": [(r"50\%", "50"), ("50%", "50"), ("12", "12 percent")],
    "assignment": [
        ("x=2", "2"),
        ("2x+1", "y=2x+1"),
        ("2x", "f(x)=2x"),
        ("7", "a+b=7"),
        ("1,2", "x=1,x=2"),
        (r"x\in\{1,2\}", "1,2"),
    ],
    "equation": [("5", "2x+1=5"), ("2", "1+1=2")],
    "set_for_tuple": [("(1,2,3)", r"\{1,2,3\}"), (r"\{1,2\}", "(1,2)"), (r"\{1,2\}", "(2,1)")],
    "list_for_tuple": [("(3,1,2)", "3,1,2"), ("1,2", "(1,2)"), ("1,2", "(2,1)")],
    "singleton_set": [(r"\{5\}", "5"), (r"\{x\}", "x")],
    "list_order": [("1,2,3", "3,2,1"), ("1,2", "2 and 1")],
    "duplicates": [(r"\{1,2\}", r"\{1,1,2\}"), ("1,2,2", "1,2")],
    "brackets": [("[3,2]", "(3,2)")],
    "set_for_relation": [("1<x<2", "(1,2)"), (r"0\le x<1", "[0,1)")],
    "units": [(r"5\text{ cm}", r"5\text{ kg}"), (r"5\text{ cm}", "5"), ("5", "5 cm"), ("5", "5th"), ("2", "2m")],
    "currency": [(r"\$5", "5")],
    "degrees": [(r"90^\circ", "90"), ("90", r"90^{\circ}")],
    "case": [("A", "a"), (r"\text{east}", r"\text{East}"), ("e", "E"), ("2X", "2x")],
    "text": [("Monday", r"\text{Monday}")],
    "rounding": [("0.333333", r"\frac{1}{3}"), (r"\sqrt{2}", "1.414214"), (r"\pi", "3.14159265"), ("e", "2.718282")],
    "base": [("11", "11_2"), ("2516_8", "2516_9"), ("4210_{5}", "4210")],
    "approximation": [("2", r"x \approx 2")],
    "ratio": [("1.5", "3:2"), ("3:2", "3/2")],
}
# How wide the rows are: the rows on which it rests (none: ""), a gold, and what scores for it.
WIDE = [
    ("units", "5", r"5\text{ million}", r"5\text{ dozen}", r"5\text{ approximately}"),
    ("equation", "5", "x^2 = 5"),
    ("assignment", "5", "banana = 5", "f(7) = 5", r"x \in 5"),
    ("assignment", r"\text{odd}", r"\text{even}=\text{odd}"),
    ("assignment list_for_tuple", "(1,2)", "y=1,x=2"),
    ("approximation", "5", r"banana \approx 5", "banana ~= 5"),
    ("base", "5", "5_7", "5_0", "5_x"),
    ("", "5", r"\min(5, 7)", r"5 \mod 7", "5^T", r"5 \cdot 1^7", "--5", "5'", '5"'),
    ("", "east", "seat"),
]
# Right by any reading: refusing all quirks leaves these.
STRICT = [
    ("0.5", r"\frac{1}{2}"),
    ("1,000", "1000"),
    (r"\frac{\sqrt{3}}{2}", r"\dfrac{ \sqrt 3}{2}"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"50\%", r"50 \%"),
    ("x=2", "x = 2"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("(1,2)", r"\left(1, 2\right)"),
    ("1,2", "1, 2"),
    (r"5\text{ cm}", r"5\text{ cm}"),
    (r"(-\infty,1)\cup(2,3)", r"(-\infty, 1) \cup (2, 3)"),
    ("y=2x+1", "2x-y+1=0"),
    (r"\text{east}", r"\textbf{east}"),
    ("x<2", "2>x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("A", r"\text{(A)}"),
    (r"\pm 2", "2,-2"),
    ("2516_8", "2516_{8}"),
    ("8", "2^3"),
    (r"90^\circ", r"90^{\circ}"),
    ("1.5", "1.50"),
    ("2.5x", r"\frac{5}{2}x"),
]


@pytest.mark.parametrize(
    ("name", "gold", "answer"),
    [(name, q.gold, q.answer) for name, q in QUIRKS.items()]
    + [(n, *pair) for n, pairs in MORE.items() for pair in pairs],
)
def test_each_quirk_is_accepted_today_and_refused_by_its_name_alone(name, gold, answer):
    assert grade(gold, answer) is True
    assert grade(gold, answer, [name]) is False
    assert grade(gold, answer, [other for other in QUIRKS if other != name]) is True


@pytest.mark.parametrize(("names", "gold", "answer"), [(*row[:2], answer) for row in WIDE for answer in row[2:]])
def test_the_rows_are_as_wide_as_described(names, gold, answer, reward):
    form = normal_form(answer)
    assert reward.equivalent([(gold, answer)]) == [True]
    assert [quirk for quirk in QUIRKS if not grade(gold, form, [quirk])] == names.split()
    assert answer == "banana ~= 5" or f"`{answer}`" in DOCS.read_text()


@pytest.mark.parametrize(("gold", "answer"), STRICT)
def test_what_is_right_by_any_reading_needs_no_quirk(gold, answer):
    assert grade(gold, answer) is True
    assert grade(gold, answer, list(QUIRKS)) is True


def test_the_golds_own_text_rests_on_no_quirk():
    for quirk in QUIRKS.values():
        assert grade(quirk.answer, f"  {quirk.answer} ", list(QUIRKS)) is True


def test_the_reward_refuses_what_is_not_allowed_and_says_so_in_its_version(reward):
    golds = ["50", "x", "0.5", "2", "x^2-1"]
    answers = [boxed(answer) for answer in (r"50\%", "X", r"50\%", "x=2", "(x-1)(x+1)")]
    assert reward.version.endswith(f"rules {RULES}")
    for allow, without, expected in (
        (None, (), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (QUIRKS, (), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (set(QUIRKS) - {"percent_as_number", "case"}, ("percent_as_number", "case"), [0.0, 0.0, 1.0, 1.0, 1.0]),
        ([], tuple(QUIRKS), [0.0, 0.0, 0.0, 0.0, 1.0]),
    ):
        chosen = MathVerifyReward(num_workers=1, allow=allow)
        chosen._pool = reward._pool  # whose workers have done their imports
        assert chosen.refused == refused(allow) == without
        assert chosen.version == reward.version + (f", without {', '.join(without)}" if without else "")
        assert chosen([], answers, golds) == expected
    assert MathVerifyReward(allow="case").refused == tuple(name for name in QUIRKS if name != "case")


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no quirk 'percent_as_fractions'\. Did you mean 'percent_as_fraction'"):
        MathVerifyReward(allow=["case", "percent_as_fractions"])
    with pytest.raises(ValueError, match=r"no quirk 'zzz'\. Known: percent_as_fraction, "):
        refused({"zzz"})


ROLLOUTS = [
    *((gold, boxed(answer), True) for gold, answer in pairs(RIGHT_HERE)),
    *((gold, boxed(answer), False) for gold, answer in pairs(WRONG_HERE)),
    *BOXES,
]


@pytest.mark.parametrize(("gold", "rollout", "here"), ROLLOUTS)
def test_the_differences_are_as_listed(gold, rollout, here, reward):
    assert reward([], [rollout], [gold]) == [float(here)]
    sides = [parse(text, parsing_timeout=None) for text in (boxed(gold), rollout)]
    assert verify(*sides, timeout_seconds=None) is not here


@pytest.mark.parametrize(("gold", "answer"), LOST)
def test_what_is_lost_is_as_listed(gold, answer, reward):
    assert reward([], [boxed(answer)], [gold]) == [0.0]
    assert f"| `{gold}` | `{answer}` |" in DOCS.read_text()


def test_the_docs_show_every_row():
    text = DOCS.read_text()
    for name, quirk in QUIRKS.items():
        assert f"| `{name}` | {quirk.what} | `{quirk.gold}` | `{quirk.answer}` |" in text
    rows = [(gold, answer, True) for gold, answer in pairs(RIGHT_HERE)]
    rows += [(gold, answer, False) for gold, answer in pairs(WRONG_HERE) if len(answer) < 100]
    for gold, answer, here in rows + BOXES:
        assert f"| `{gold}` | `{answer}` | {'right | wrong' if here else 'wrong | right'} |" in text
