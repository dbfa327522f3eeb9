"""Quirks and differences: every row of the tables, allowed and refused, and the docs that show them."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from math_verify import parse, verify

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.grading import _RELIES_ON, grade
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
    why: str


DIFFERENCES: dict[str, Difference] = {
    "scientific": Difference(
        r"8.7 \times 10^{8}", "870000000", True, False, "Numerals of the same value are equal; it compares floats."
    ),
    "e_notation": Difference("1000", "1e3", True, False, "It reads 1e3 as 1 times Euler's number times 3."),
    "e_product": Difference("1e3", "3e1", False, True, "For the same reason these two are equal to it."),
    "thin_space": Difference("1000", r"1\,000", True, False, "It reads a thin space between digits as a product."),
    "thin_space_product": Difference("0", r"1\,000", False, True, "So it takes this for 1 times 000."),
    "signed_thousands": Difference(
        "1000", "+1,000", True, False, "It reads a sign before thousands as a list, +1 and 0."
    ),
    "decimal_quotient": Difference(
        "7/3", r"\frac{7}{3.0}", True, False, "It takes the quotient of a decimal for a float, unequal to the fraction."
    ),
    "trailing_point": Difference("7", "7.", True, False, "It does not read a decimal point without digits behind it."),
    "same_text": Difference(
        "seven ? eight", "seven  ?  eight", True, False, "The gold's own text is right, white space aside."
    ),
    "spaced_thousands": Difference("12000", "12 000", True, False, "It reads numbers side by side as a product."),
    "spaced_price": Difference("12000", r"\$12\,000", True, False, "For the same reason."),
    "assigned_thousands": Difference("1000", "x=1,000", True, False, "It reads a list, x=1 and 0."),
    "markdown": Difference("42", "**42**", True, False, "It does not know Markdown."),
    "full_stop": Difference("42", "42.", True, False, "It does not read a full stop behind an answer."),
    "thousands_by_blank": Difference("13535", "13 535", True, False, "It reads 13 + 535."),
    "root_sign": Difference(r"\sqrt{5}", "√5", True, False, "It does not know the sign."),
    "mixed_number": Difference(r"\frac{3}{2}", "1 1/2", True, False, "It reads 1 times 1/2, or 1."),
    "empty_set": Difference(r"\emptyset", r"\varnothing", True, False, "It reads a name."),
    "product": Difference("8", "2(4)", True, False, "It reads a mixed number, 2 + 4."),
    "product_of_brackets": Difference("40", "(5)(8)", True, False, "It reads an application of 5 to 8."),
    "braces": Difference("(1,2)", "{(1,2)}", True, False, "It reads braces, fonts and colours as part of the formula."),
    "colour": Difference("40", r"\color{red}{40}", True, False, "For the same reason."),
    "sizes": Difference("(1,2)", r"\bigl(1,2\bigr)", True, False, "It does not know the sizes of brackets."),
    "matrix_rows": Difference(
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\begin{pmatrix}1\\[4pt]2\end{pmatrix}",
        True,
        False,
        "It does not know distances of rows.",
    ),
    "sign_of_currency": Difference("5", "€5", True, False, "It does not know the sign."),
    "unicode": Difference("x^2", "x²", True, False, "It does not know the character, nor ½, ５, • and the like."),
    "degree_sign": Difference("90", "90°", True, False, "For the same reason."),
    "degree_command": Difference(r"90^\circ", r"90\degree", True, False, "It does not know the command."),
    "repeating": Difference(r"\frac{1}{3}", r"0.\overline{3}", True, False, "It reads a name."),
    "listed_thousands": Difference("1000, 2000", "1,000, 2,000", True, False, "It reads a list of four numbers."),
    "braced_thousands": Difference(
        r"\dfrac{1}{29,\!322}", r"\frac{1}{29322}", True, False, "It does not read thousands in a fraction."
    ),
    "counted": Difference("40", "40 dollars", True, False, "It knows some units outside of \\text{} only."),
    "speed": Difference("40", "40 m/s", True, False, "For the same reason."),
    "ordinal": Difference("40", r"40^{\text{th}}", True, False, "It reads a power."),
    "letter_in_font": Difference("3i", r"3\mathrm{i}", True, False, "It takes a letter in a font for a unit."),
    "spaced_i": Difference("2+3i", "2+3 i", True, False, "It reads a real variable."),
    "text_name": Difference(
        "40", r"\text{cost}=40\text{ dollars}", True, False, "It cuts off all from the first text on."
    ),
    "percent_in_text": Difference(r"\frac{1}{2}", r"50\text{ percent}", True, False, "It cuts off the text as a unit."),
    "assigned_e": Difference("0.00085", "x=8.5e-4", True, False, "It reads Euler's number."),
    "quotient_point": Difference("-1./3", r"-\frac13", True, False, "It does not read 1. before the stroke."),
    "times_x": Difference(r"6.02\times10^{23}", "6.02 x 10^{23}", True, False, "It reads a variable."),
    "tilde": Difference("40", r"40~\text{units}", True, False, "It does not know the blank."),
    "index": Difference("n^2-1", r"m_{\max}=n^2-1", True, False, "It does not read the index."),
    "gamma": Difference(
        r"m\left(\gamma^{2}-1\right)",
        r"(\gamma^2-1)m",
        True,
        False,
        "It reads the gamma function, not a letter.",
    ),
    "stop_in_text": Difference("A", r"\text{A.}", True, False, "It does not read a full stop behind an answer."),
    "text_beside": Difference("0", r"\text{I give up, } 0", False, True, "It reads a product with a text, here 0."),
    "text_in_list": Difference("6, 8, 10", r"6, 8\text{, and }10", True, False, "For the same reason."),
    "number_beside": Difference("6", "1 2 3", False, True, "It reads a product; here what stands beside is none."),
    "wide_space": Difference("0", r"25 \quad 0", False, True, "For the same reason."),
    "behind_a_space": Difference("5", r"7\quad -2", False, True, "It reads over a wide space, a new line too."),
    "cell": Difference(
        r"\begin{pmatrix}6&1\end{pmatrix}",
        r"\begin{pmatrix}1 2 3&1\end{pmatrix}",
        False,
        True,
        "It reads a product in the cell.",
    ),
    "letter_is_no_unit": Difference("3", r"3\mathrm{i}", False, True, "It takes the letter for a unit."),
    "constant_beside": Difference(r"3\pi", r"\pi 3", False, True, "It reads a product; numbers stand before letters."),
    "unit_of_nothing": Difference(r"\text{A}", "A cm", False, True, "It cuts off a unit where there is no number."),
    "denied_name": Difference(
        "5", r"\text{number who play neither} = 5", False, True, "Names with such words are refused as well."
    ),
    "number_word": Difference("5", r"5\text{ six}", False, True, "It cuts off any text at the end."),
    "number_word_as_name": Difference("5", r"\text{six} = 5", False, True, "It takes the text for a name."),
    "group_beside": Difference("0", "{87}{0}", False, True, "For the same reason."),
    "dollars_beside": Difference("0, -1", "7 $0, -1$", False, True, "It removes dollar signs, and reads a product."),
    "quotation_mark": Difference("56", '5"6', False, True, "It removes quotation marks, and reads one number."),
    "denied": Difference("5", "not x = 5", False, True, "It takes the word for letters, and the right side."),
    "denied_approximation": Difference(
        r"\approx 8.24 \text{ mph}", r"not \approx 8.24 \text{ mph}", False, True, "For the same reason."
    ),
    "improper": Difference("13", r"5\frac{8}{1}", False, True, "It reads a mixed number, whose fraction is none."),
    "prose": Difference("12", "about 12?", False, True, "It takes the last number of what it cannot read."),
    "no_unit": Difference("5", r"5 \text{ or not}", False, True, "It cuts off any text at the end, a hedge too."),
    "unit_and_more": Difference(
        "5", r"5\text{ cm} + {x}", False, True, "It cuts off all from the text on; a unit is one, and nothing else."
    ),
    "dots": Difference("1,9", r"1,\ldots,9", False, True, "It leaves out dots; a gold with them is its text."),
    "builder": Difference("4", r"\{x : x = 4\}", False, True, "It reads x : x as 1, and the right side."),
    "formula_chain": Difference("x^2", "2x=x^2", False, True, "It takes the last side, whatever stands before it."),
    "chain": Difference("8", "x = 7 = 8", False, True, "It takes the last side, whatever stands before it."),
    "untrue_equation": Difference("2", "3=2", False, True, "For the same reason."),
    "far_approximation": Difference("7", r"7 \approx 8", False, True, "It takes the first side, whatever follows."),
    "any_function": Difference("0", "0 f(7)", False, True, "For the same reason as the next."),
    "any_symbol": Difference("0", r"0 \cdot a", False, True, "An answer must have no letters that the gold has not."),
    "small_numbers": Difference(
        r"1.6 \times 10^{-19}", "0.0", False, True, "It rounds to six decimals, so that all small numbers are 0."
    ),
    "other_currency": Difference(r"x=\$18.90", "x=€18.90", False, True, "It leaves out the signs of currencies."),
    "point_interval": Difference("5", "[5, 5]", False, True, "It reads a set of one element."),
    "closed_infinity": Difference(
        r"(-\infty,\infty)",
        r"[-\infty, \infty]",
        False,
        True,
        "To sympy both are the same; infinity is no number.",
    ),
    "set_with_infinity": Difference(
        r"(-\infty,2)", r"\{-\infty,2\}", False, True, "It takes a set of two for a pair, also for this interval."
    ),
    "time": Difference(
        "8:34", r"\frac{4}{17}", False, True, "It reads a ratio; one that is not in lowest terms is a time of day."
    ),
    "gold_tail": Difference("2x^2 + 3y^2 = d", "3", False, True, "It takes the gold's last letter for a unit."),
    "gold_letter": Difference("6m", "6", False, True, "A bare letter of a gold is its own, and no unit."),
    "screened": Difference(
        "2", "(" * 30 + "2" + ")" * 30, False, None, "Its time doubles with every bracket, far beyond any timeout."
    ),
    "screened_loop": Difference(
        r"-\frac{3}{8}",
        r"-\frac{3}{8" * 31,
        False,
        True,
        "It reads the beginning of a loop that runs on; what is that deep or long is wrong unseen.",
    ),
    "product_sized": Difference(
        "20", r"(4)\left(5\right)", True, False, "It reads a mixed number, 4 + 5, wherever brackets make the numbers."
    ),
    "mixed_of_brackets": Difference("9", r"(4)\left(5\right)", False, True, "For the same reason."),
    "product_of_binomials": Difference("1260", r"\binom{10}{4}\binom{4}{2}", True, False, "For the same reason."),
    "imaginary": Difference(r"-8-8 \sqrt{3} i", r"-8-8i\sqrt{3}", True, False, "It reads a real variable."),
    "complex_square": Difference(
        "3+4i", "(2+i)^2", True, False, "It reads a real variable, or none, by what stands beside the letter."
    ),
    "factorial_equals": Difference("24", "4!=24", True, False, "It reads 4 is not 24."),
    "inequality": Difference(
        r"(-\infty,2)", "x<2", True, False, "It lets an interval stand for an inequality, but not the reverse."
    ),
    "base_in_brackets": Difference("2516_8", "(2516)_8", True, False, "It reads an index of a product."),
    "base_in_words": Difference("2516_8", r"2516\text{ base }8", True, False, "It cuts off the text as a unit."),
    "choices": Difference(r"\text{B,C}", "B, C", True, False, "It reads a name of three characters."),
    "introduction": Difference("12", r"\text{Answer: }12", True, False, "It cuts off all from the text on."),
    "square_unit": Difference("12", "12 cm^2", True, False, "It reads a product of letters."),
    "blank_percent": Difference(r"32\%", r"32\,\%", True, False, "It does not know the blank."),
    "event": Difference("0.5", r"\mathbb{P}(X>1)=\frac12", True, False, "It reads an inequality in the brackets."),
    "tag": Difference("12", r"12\tag{1}", True, False, "It does not know the command."),
    "unit_formula": Difference(
        "12",
        r"12\text{ m}\cdot\sqrt{\pi}",
        False,
        True,
        "It cuts off all from the text on; a unit is one, and nothing else.",
    ),
    "three_parts": Difference("1:2:3", "1:6", False, True, "It reads a quotient, 1/6."),
    "seconds": Difference(r"4\!:\!51\!:\!06 \text{ p.m.}", "4:06:51", False, True, "For the same reason."),
    "prime": Difference("x^2", "(x^2)'", False, True, "It passes over primes, also those of derivatives."),
    "end_points": Difference("1<x<2", r"\{1,2\}", False, True, "It takes an open interval for the pair of its ends."),
    "short_word": Difference("5", "5ab", False, True, "It knows units of two letters that are none."),
}
# Rollouts, whose boxes Math-Verify finds otherwise.
BOXES: dict[str, Difference] = {
    "last_box": Difference("2", r"\boxed{1} is wrong, so \boxed{2}", True, False, "It joins boxes that are near."),
    "no_box": Difference("7", "no box: 7", False, True, "It takes the last number, or a box that is not closed."),
    "part_of_a_formula": Difference(
        r"\frac{5}{6}", r"\boxed 5/6", False, True, "It takes all that follows; here a box without braces is a numeral."
    ),
}


# Right answers that score 0: (gold, answer, why).
LOST = [
    ("(A)", "(A) 5", "What stands beside a choice is not read; write `(A)`, or give both golds."),
    (r"(-\infty,-1)\cup(3,\infty)", r"x<-1 \text{ or } x>3", "Two inequalities are a list, and not a union."),
    (r"1\pm\sqrt{2}", r"\frac{2\pm\sqrt{8}}{2}", "Two signs within a formula are not read."),
    ("(1,2)", r"\begin{cases}x=1\\y=2\end{cases}", "A system is not read; write `(1,2)` or `x=1, y=2`."),
    ("12", "12 L", "One letter behind a number is a variable where it is no metre, second or gram."),
    ("12", r"\max f(x) = 12", "A name of several words is not read."),
    (r"33\frac{1}{3}\%", r"\frac{100}{3}\%", "The parser reads a sign of percent behind a numeral only."),
]


def math_verify(gold, answer):
    """Its own verdict on the contents of two boxes."""
    sides = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
    return verify(*sides, timeout_seconds=None)


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


def test_every_quirk_has_a_rule_and_examples():
    assert list(_RELIES_ON) == list(QUIRKS) == list(MORE)


@pytest.fixture(scope="module")
def reward():
    reward = MathVerifyReward(num_workers=1, timeout=3.0)
    yield reward
    reward.close()


def test_the_reward_refuses_what_is_not_allowed_and_says_so_in_its_version(reward):
    default = reward
    strict = MathVerifyReward(num_workers=1, allow=set(QUIRKS) - {"percent_as_number", "case"})
    golds, answers = ["50", "x", "0.5"], [r"\boxed{50\%}", r"\boxed{X}", r"\boxed{50\%}"]
    assert default([], answers, golds) == [1.0, 1.0, 1.0]
    assert strict([], answers, golds) == [0.0, 0.0, 1.0]
    assert default.version == MathVerifyReward(allow=QUIRKS).version
    assert default.version.endswith(f"rules {RULES}")
    assert strict.version == f"{default.version}, without percent_as_number, case"
    assert MathVerifyReward(allow="case").refused == tuple(name for name in QUIRKS if name != "case")
    strict.close()


def test_nothing_allowed_is_the_strictest_setting_and_none_the_laxest():
    assert refused([]) == refused(()) == tuple(QUIRKS)
    assert refused(None) == ()
    assert refused(list(QUIRKS)) == ()
    strict = MathVerifyReward(num_workers=1, allow=[])
    assert strict.refused == tuple(QUIRKS)
    assert strict.version.endswith(f"without {', '.join(QUIRKS)}")
    assert strict([], [r"\boxed{x=2}", r"\boxed{X}", r"\boxed{(x-1)(x+1)}"], ["2", "x", "x^2-1"]) == [0.0, 0.0, 1.0]
    strict.close()


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no quirk 'percent_as_fractions'\. Did you mean 'percent_as_fraction'"):
        MathVerifyReward(allow=["case", "percent_as_fractions"])
    with pytest.raises(ValueError, match=r"no quirk 'zzz'\. Known: percent_as_fraction, "):
        refused({"zzz"})


IN_WORDS = {"2": "2 in 30 brackets", r"-\frac{3}{8}": "the gold 31 times, unclosed"}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_differences_are_as_listed(name, reward):
    row = DIFFERENCES[name]
    assert reward([], [rf"\boxed{{{row.answer}}}"], [row.gold]) == [float(row.here)]
    if row.math_verify is not None:
        assert math_verify(row.gold, row.answer) is row.math_verify
        assert row.here is not row.math_verify


@pytest.mark.parametrize("name", BOXES)
def test_boxes_are_found_as_listed(name, reward):
    row = BOXES[name]
    assert reward([], [row.answer], [row.gold]) == [float(row.here)]
    found = verify(parse(rf"\boxed{{{row.gold}}}"), parse(row.answer), timeout_seconds=None)
    assert found is row.math_verify is not row.here


@pytest.mark.parametrize(("gold", "answer", "why"), LOST)
def test_what_is_lost_is_as_listed(gold, answer, why, reward):
    assert reward([], [rf"\boxed{{{answer}}}"], [gold]) == [0.0]
    assert f"| `{gold}` | `{answer}` | {why} |" in DOCS.read_text()


def test_the_docs_show_every_row():
    text = DOCS.read_text()
    for name, quirk in QUIRKS.items():
        assert f"| `{name}` | {quirk.what} | `{quirk.gold}` | `{quirk.answer}` |" in text
    for row in [*DIFFERENCES.values(), *BOXES.values()]:
        words = {True: "right", False: "wrong", None: "none in time"}
        answer = row.answer if len(row.answer) < 40 else IN_WORDS[row.gold]
        assert f"| `{row.gold}` | `{answer}` | {words[row.here]} | {words[row.math_verify]} | {row.why} |" in text
