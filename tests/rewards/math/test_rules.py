"""Quirks and differences: every row of the tables, allowed and refused, and the docs that show them."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from math_verify import parse, verify

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.grading import grade
from basis_rl.rewards.math.notation import normal_form
from basis_rl.rewards.math.rules import QUIRKS, RULES, refused

DOCS = Path(__file__).resolve().parents[3] / "docs" / "rewards.md"


@dataclass(frozen=True)
class Difference:
    """A pair whose verdict here is deliberately not Math-Verify's (None: it does not come to one in time)."""

    gold: str
    answer: str
    here: bool
    math_verify: bool | None


DIFFERENCES: dict[str, Difference] = {
    "scientific": Difference(r"8.7 \times 10^{8}", "870000000", True, False),
    "e_notation": Difference("1000", "1e3", True, False),
    "e_product": Difference("1e3", "3e1", False, True),
    "thin_space": Difference("1000", r"1\,000", True, False),
    "thin_space_product": Difference("0", r"1\,000", False, True),
    "signed_thousands": Difference("1000", "+1,000", True, False),
    "decimal_quotient": Difference("7/3", r"\frac{7}{3.0}", True, False),
    "trailing_point": Difference("7", "7.", True, False),
    "same_text": Difference("seven ? eight", "seven  ?  eight", True, False),
    "spaced_thousands": Difference("12000", "12 000", True, False),
    "spaced_price": Difference("12000", r"\$12\,000", True, False),
    "assigned_thousands": Difference("1000", "x=1,000", True, False),
    "markdown": Difference("42", "**42**", True, False),
    "full_stop": Difference("42", "42.", True, False),
    "thousands_by_blank": Difference("13535", "13 535", True, False),
    "root_sign": Difference(r"\sqrt{5}", "√5", True, False),
    "mixed_number": Difference(r"\frac{3}{2}", "1 1/2", True, False),
    "empty_set": Difference(r"\emptyset", r"\varnothing", True, False),
    "product": Difference("8", "2(4)", True, False),
    "product_of_brackets": Difference("40", "(5)(8)", True, False),
    "braces": Difference("(1,2)", "{(1,2)}", True, False),
    "colour": Difference("40", r"\color{red}{40}", True, False),
    "sizes": Difference("(1,2)", r"\bigl(1,2\bigr)", True, False),
    "matrix_rows": Difference(
        r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\[4pt]2\end{pmatrix}", True, False
    ),
    "sign_of_currency": Difference("5", "€5", True, False),
    "unicode": Difference("x^2", "x²", True, False),
    "degree_sign": Difference("90", "90°", True, False),
    "degree_command": Difference(r"90^\circ", r"90\degree", True, False),
    "repeating": Difference(r"\frac{1}{3}", r"0.\overline{3}", True, False),
    "listed_thousands": Difference("1000, 2000", "1,000, 2,000", True, False),
    "braced_thousands": Difference(r"\dfrac{1}{29,\!322}", r"\frac{1}{29322}", True, False),
    "counted": Difference("40", "40 dollars", True, False),
    "speed": Difference("40", "40 m/s", True, False),
    "ordinal": Difference("40", r"40^{\text{th}}", True, False),
    "letter_in_font": Difference("3i", r"3\mathrm{i}", True, False),
    "spaced_i": Difference("2+3i", "2+3 i", True, False),
    "text_name": Difference("40", r"\text{cost}=40\text{ dollars}", True, False),
    "percent_in_text": Difference(r"\frac{1}{2}", r"50\text{ percent}", True, False),
    "assigned_e": Difference("0.00085", "x=8.5e-4", True, False),
    "quotient_point": Difference("-1./3", r"-\frac13", True, False),
    "times_x": Difference(r"6.02\times10^{23}", "6.02 x 10^{23}", True, False),
    "tilde": Difference("40", r"40~\text{units}", True, False),
    "index": Difference("n^2-1", r"m_{\max}=n^2-1", True, False),
    "gamma": Difference(r"m\left(\gamma^{2}-1\right)", r"(\gamma^2-1)m", True, False),
    "stop_in_text": Difference("A", r"\text{A.}", True, False),
    "text_beside": Difference("0", r"\text{I give up, } 0", False, True),
    "text_in_list": Difference("6, 8, 10", r"6, 8\text{, and }10", True, False),
    "number_beside": Difference("6", "1 2 3", False, True),
    "wide_space": Difference("0", r"25 \quad 0", False, True),
    "behind_a_space": Difference("5", r"7\quad -2", False, True),
    "cell": Difference(r"\begin{pmatrix}6&1\end{pmatrix}", r"\begin{pmatrix}1 2 3&1\end{pmatrix}", False, True),
    "letter_is_no_unit": Difference("3", r"3\mathrm{i}", False, True),
    "constant_beside": Difference(r"3\pi", r"\pi 3", False, True),
    "unit_of_nothing": Difference(r"\text{A}", "A cm", False, True),
    "denied_name": Difference("5", r"\text{number who play neither} = 5", False, True),
    "number_word": Difference("5", r"5\text{ six}", False, True),
    "number_word_as_name": Difference("5", r"\text{six} = 5", False, True),
    "group_beside": Difference("0", "{87}{0}", False, True),
    "dollars_beside": Difference("0, -1", "7 $0, -1$", False, True),
    "quotation_mark": Difference("56", '5"6', False, True),
    "denied": Difference("5", "not x = 5", False, True),
    "denied_approximation": Difference(r"\approx 8.24 \text{ mph}", r"not \approx 8.24 \text{ mph}", False, True),
    "improper": Difference("13", r"5\frac{8}{1}", False, True),
    "prose": Difference("12", "about 12?", False, True),
    "no_unit": Difference("5", r"5 \text{ or not}", False, True),
    "unit_and_more": Difference("5", r"5\text{ cm} + {x}", False, True),
    "dots": Difference("1,9", r"1,\ldots,9", False, True),
    "builder": Difference("4", r"\{x : x = 4\}", False, True),
    "formula_chain": Difference("x^2", "2x=x^2", False, True),
    "chain": Difference("8", "x = 7 = 8", False, True),
    "untrue_equation": Difference("2", "3=2", False, True),
    "far_approximation": Difference("7", r"7 \approx 8", False, True),
    "any_function": Difference("0", "0 f(7)", False, True),
    "any_symbol": Difference("0", r"0 \cdot a", False, True),
    "small_numbers": Difference(r"1.6 \times 10^{-19}", "0.0", False, True),
    "other_currency": Difference(r"x=\$18.90", "x=€18.90", False, True),
    "point_interval": Difference("5", "[5, 5]", False, True),
    "closed_infinity": Difference(r"(-\infty,\infty)", r"[-\infty, \infty]", False, True),
    "set_with_infinity": Difference(r"(-\infty,2)", r"\{-\infty,2\}", False, True),
    "time": Difference("8:34", r"\frac{4}{17}", False, True),
    "gold_tail": Difference("2x^2 + 3y^2 = d", "3", False, True),
    "gold_letter": Difference("6m", "6", False, True),
    "screened": Difference("2", "(" * 30 + "2" + ")" * 30, False, None),
    "screened_loop": Difference(r"-\frac{3}{8}", r"-\frac{3}{8" * 31, False, True),
    "product_sized": Difference("20", r"(4)\left(5\right)", True, False),
    "mixed_of_brackets": Difference("9", r"(4)\left(5\right)", False, True),
    "product_of_binomials": Difference("1260", r"\binom{10}{4}\binom{4}{2}", True, False),
    "imaginary": Difference(r"-8-8 \sqrt{3} i", r"-8-8i\sqrt{3}", True, False),
    "complex_square": Difference("3+4i", "(2+i)^2", True, False),
    "factorial_equals": Difference("24", "4!=24", True, False),
    "inequality": Difference(r"(-\infty,2)", "x<2", True, False),
    "base_in_brackets": Difference("2516_8", "(2516)_8", True, False),
    "base_in_words": Difference("2516_8", r"2516\text{ base }8", True, False),
    "choices": Difference(r"\text{B,C}", "B, C", True, False),
    "introduction": Difference("12", r"\text{Answer: }12", True, False),
    "square_unit": Difference("12", "12 cm^2", True, False),
    "blank_percent": Difference(r"32\%", r"32\,\%", True, False),
    "event": Difference("0.5", r"\mathbb{P}(X>1)=\frac12", True, False),
    "tag": Difference("12", r"12\tag{1}", True, False),
    "unit_formula": Difference("12", r"12\text{ m}\cdot\sqrt{\pi}", False, True),
    "three_parts": Difference("1:2:3", "1:6", False, True),
    "seconds": Difference(r"4\!:\!51\!:\!06 \text{ p.m.}", "4:06:51", False, True),
    "prime": Difference("x^2", "(x^2)'", False, True),
    "end_points": Difference("1<x<2", r"\{1,2\}", False, True),
    "short_word": Difference("5", "5ab", False, True),
}
# Rollouts, whose boxes Math-Verify finds otherwise.
BOXES: dict[str, Difference] = {
    "last_box": Difference("2", r"\boxed{1} is wrong, so \boxed{2}", True, False),
    "no_box": Difference("7", "no box: 7", False, True),
    "part_of_a_formula": Difference(r"\frac{5}{6}", r"\boxed 5/6", False, True),
}


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


def math_verify(gold, rollout):
    return verify(*(parse(text, parsing_timeout=None) for text in (boxed(gold), rollout)), timeout_seconds=None)


def boxed(text):
    return rf"\boxed{{{text}}}"


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
# How wide the rows are: what scores for the gold 5, and by which of them, if any.
WIDE = {
    "units": [r"5\text{ million}", r"5\text{ dozen}", r"5\text{ approximately}"],
    "equation": ["x^2 = 5"],
    "assignment": ["banana = 5", "f(7) = 5", r"x \in 5"],
    "approximation": [r"banana \approx 5", "banana ~= 5"],
    "base": ["5_7", "5_0", "5_x"],
    None: [r"\min(5, 7)", r"5 \mod 7", "5^T", r"5 \cdot 1^7", "--5", "5'", '5"'],
}
# What scores for other golds, by the same rows.
WIDE_ELSEWHERE = [
    ("assignment", "(1,2)", "y=1,x=2"),
    ("assignment", r"\text{odd}", r"\text{even}=\text{odd}"),
    (None, "east", "seat"),
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


@pytest.mark.parametrize(("name", "answer"), [(name, answer) for name, answers in WIDE.items() for answer in answers])
def test_the_rows_are_as_wide_as_described(name, answer, reward):
    form = normal_form(answer)
    assert reward.equivalent([("5", answer)]) == [True]
    assert [quirk for quirk in QUIRKS if not grade("5", form, [quirk])] == ([] if name is None else [name])
    assert answer == "banana ~= 5" or f"`{answer}`" in DOCS.read_text()


@pytest.mark.parametrize(("name", "gold", "answer"), WIDE_ELSEWHERE)
def test_the_rows_are_as_wide_for_other_golds(name, gold, answer):
    assert grade(gold, answer) is True
    assert name is None or grade(gold, answer, [name]) is False
    assert f"`{answer}` for `{gold}`" in DOCS.read_text()


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


IN_WORDS = {"2": "2 in 30 brackets", r"-\frac{3}{8}": "the gold 31 times, unclosed"}


@pytest.mark.parametrize("name", [*DIFFERENCES, *BOXES])
def test_the_differences_are_as_listed(name, reward):
    row = DIFFERENCES.get(name) or BOXES[name]
    rollout = boxed(row.answer) if name in DIFFERENCES else row.answer
    assert reward([], [rollout], [row.gold]) == [float(row.here)]
    if row.math_verify is not None:
        assert math_verify(row.gold, rollout) is row.math_verify is not row.here


@pytest.mark.parametrize(("gold", "answer"), LOST)
def test_what_is_lost_is_as_listed(gold, answer, reward):
    assert reward([], [boxed(answer)], [gold]) == [0.0]
    assert f"| `{gold}` | `{answer}` |" in DOCS.read_text()


def test_the_docs_show_every_row():
    text = DOCS.read_text()
    for name, quirk in QUIRKS.items():
        assert f"| `{name}` | {quirk.what} | `{quirk.gold}` | `{quirk.answer}` |" in text
    for row in [*DIFFERENCES.values(), *BOXES.values()]:
        words = {True: "right", False: "wrong", None: "none in time"}
        answer = row.answer if len(row.answer) < 40 else IN_WORDS[row.gold]
        assert f"| `{row.gold}` | `{answer}` | {words[row.here]} | {words[row.math_verify]} |" in text
