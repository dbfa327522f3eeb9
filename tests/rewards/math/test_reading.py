r"""Normal forms, readings that are refused, and what both come to in verdicts; golds that are prose or misread."""

import logging

import pytest

from basis_rl.rewards.math.notation import normal_form, text_form
from basis_rl.rewards.math.reading import hedged, refused_reading
from tests.rewards.growth import seconds
from tests.rewards.math.test_rules import pairs

ZEROS = r"\begin{pmatrix}0&0\\0&0\end{pmatrix}"


def score(reward, gold, completion):
    return reward([], [completion if r"\boxed" in completion else rf"\boxed{{{completion}}}"], [gold])[0]


# A gold, and right answers to it in other notations. `RIGHT_HERE` in test_rules.py has more.
RIGHT = [
    ("0.5", r"\frac12"),
    (r"\frac{1}{2}", "1/2"),
    ("1000", "1,000"),
    (r"1\frac{4}{5}", r"\frac{9}{5}"),
    ("0.001", "1e-3"),
    ("4.5e33", r"4.5 \times 10^{33}"),
    (r"We get \boxed{7}.", "7"),
    ("12000", r"x=12\,000", "12{,}000", r"12,\!000", "12~000"),
    ("42", r"\mathbf{42}", r"\textbf{42}", r"\text{42}", r"\ 42\ ", "$42$", r"\(42\)", "`42`", r"\boxed 42"),
    ("42", r"So \boxed42.", r"\bm{42}", r"\quad 42", "€42"),
    ("1234567", "1 234 567"),
    ("-13535", "−13 535"),
    (r"\sqrt{x+1}", "√(x+1)"),
    (r"\frac{31}{4}", r"7 3/4 \text{ cups}"),
    (r"\emptyset", "∅"),
    (r"2\pi", "2π"),
    ("10^3x", r"1000 \cdot x"),
    ("3, 5", r"$3$\text{, or }$5$"),
    (r"\text{not a prime}", r"\text{not  a prime}."),
    (r"\text{Neither}", r"\text{neither}"),
    ("5", r"\text{No. of ways} = 5", r"\text{Day 3} = 5", r"\text{3 apples} = 5", "x = 2 + 3 = 5", "x = 2x - 5 = 5"),
    ("5", "a + b = x = 5", "f(x) = x = 5", "y = x^7 = 5", "5'", "I=5", "e=5", "E=5", "I_1=5", "e_1=5", "|I|=5"),
    ("5", "E[X]=5", r"\operatorname{E}[X]=5", r"\mathbb{E}(X)=5"),
    ("120", "5! = 120"),
    (r"\$5", r"x = \$5"),
    (r"12\text{ m}\cdot\text{s}^{-1}", "12"),
    (r"15\text{ cm$^{2}$}", "15"),
    ("1, 2", r"\boxed{1} and \boxed{2}"),
    ("2, 3, 5", r"$$\boxed{2}, \boxed{3}, \boxed{5}$$"),
    ("(2,2), (6,2)", r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$"),
    (r"\pi", r"\pi \approx 3.14"),
    ("0.5", r"P(\text{not red})=\frac12", r"P(A|B)=\frac12", r"E(X \mid Y)=\frac12"),
    ("20", "4(5)", r"4\left(5\right)=20", r"\binom{4}{1}\binom{5}{1}"),
    ("2.5", r"2\frac12", r"2\dfrac{1}{2}", r"\frac{1}{2}(5)", r"\left(5\right)\frac12"),
    ("60", r"\frac{120}{2}=60", "120/2 = 60", r"60 = \frac{120}{2}", r"\binom{60}{1} = 60"),
    ("24", "x=4!=24"),
    ("3+4i", r"\frac{25}{3-4i}", "4i+3", "3 + 4 i"),
    (r"\frac{n(n+1)}{2}", r"\sum_{i=1}^n i"),
    ("[2,5]", r"2\le x\le5"),
    (r"[0,\infty)", r"x\ge0"),
    ("2516_8", "(2516)_{8}", r"2516 \text{ (base 8)}"),
    (r"\text{B,C}", "B,C", r"\text{B}, \text{C}", r"B \text{ and } C", r"\text{(B) and (C)}"),
    ("12", "12cm²", r"\text{The answer is } 12", r"\boxed{12}", r"\fbox{12}", r"12\checkmark", r"\LARGE 12"),
    ("1:2:3", "2:4:6"),
    ("2x", "f'(x)=2x"),
    (r"4\!:\!51\!:\!06 \text{ p.m.}", "4:51:06"),
    ("7465", r"7465 \approx 7500"),
    ("4.8", "4.8.", "4.8 .", "4.8,", r"4.8\text{.}", "x=4.8.", "4.8\\\\", "4.8 \\\\"),
    ("40", "'40'", "**$40$**", "$**40**$", "=40", r"\therefore x=40", "x := 40", "40=x", "４０", r"\underline{40}"),
    ("40", r"{\color{red}40}", r"\textcolor{red}{40}", r"\large 40", "{40}", "\ufeff40\u200b", "5(8)"),
    ("40", r"5\left(8\right)", r"\text{40 cm}", r"\textbf{40 ways}", "40 people", r"40\ \mathrm{cm^2}"),
    ("40", r"40\ \mathrm{m/s^2}", r"40\ \mathrm{cm}", "40^{th}", r"\text{Area} = 40\text{ cm}^2"),
    ("[1,2]", "I=[1,2]"),
    (r"\frac{\pi}{2}", r"I=\int_0^\infty \frac{\sin x}{x}dx=\frac{\pi}{2}"),
    (r"\frac{1}{2}", r"P(\text{not red})=\frac{1}{2}", r"P(A \mid \text{not } B)=\frac{1}{2}", r"P(A)=\frac{1}{2}"),
    (r"\frac{1}{2}", "½", r"{1\over2}", r"\mathbf{\frac{1}{2}}"),
    ("16", r"\text{boys plus girls} = 16", r"\text{days without rain} = 16", r"\text{revenue minus cost} = 16"),
    ("3,5", r"3\ \text{and}\ 5", r"3\,\text{and}\,5", r"3~\text{and}~5", r"3\quad\text{and}\quad5", r"3 \text{and} 5"),
    ("3,5", r"3\text{and}5", r"x=3\ \text{or}\ x=5", r"\boxed{3}\\\boxed{5}", r"\text{3 and 5}"),
    ("1000", "(1,000)", r"x\approx 1,000", "{1,000}", "=1,000"),
    ("1000, 2000", "1,000 and 2,000"),
    (r"\frac{3}{2}", "1½"),
    (r"\sqrt[3]{2}", "2^(1/3)"),
    ("x^2+1", "x²+1"),
    ("90", r"90\degree", "90°."),
    (r"\frac{1}{6}", r"0.1\overline{6}", r".1\bar{6}", r"0.1\dot6"),
    ("2+3i", r"2+3\,i"),
    ("e^{2}", r"\mathrm{e}^2"),
    (r"3\pi", r"3\text{π}"),
    ("(1,2)", r"\textbf{(1, 2)}", r"(1,2)\text{.}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\[4pt]3&4\\\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\\\end{pmatrix}"),
    ("8:34", r"8\!:\!34 \text{ p.m.}", "08:34", r"\text{8:34 AM}", "8{:}34"),
    (r"8\!:\!34 \text{ p.m.}", "8:34", r"8:34\text{ PM}"),
    (r"05\!:\!00", "5:00"),
    ("3:2", r"\frac{3}{2}"),
    (r"$m_{\max }=n^{2}-n-1$", "n^2-n-1"),
    (r"\text{A}", r"\text{A.}"),
    (r"\text{Evelyn}", r"\textbf{\text{Evelyn}}"),
    ("x=5", "5=x"),
]
# A gold, and answers that are not it. `WRONG_HERE` has more.
WRONG = [
    ("2", "(" * 30 + "2" + ")" * 30),  # Math-Verify comes to no verdict in time
    ("7", "8", "", r"2\frac{1}{3}"),
    ("3", r"I guess \boxed{3} or \boxed{4}"),
    ("(1,2)", "(2,1)"),
    ("4.5e33", r"4.6 \times 10^{33}"),
    (r"\frac{21}{2}", r"2\frac{1}{2}"),
    (r"1\frac{4}{5}", r"\frac{14}{5}"),
    ("31.5", r"6\frac{3}{2}"),
    ("12", r"1\ 2", "1  2"),
    ("0", "12 000", r"\$12\,000", "0 I give up", r"\text{no} \cdot 0", "0.0000001", "x 0", r"5\text{ cm }0", "A) 0"),
    ("0", "0=0", "{87}e{0}", r"{87}\hfil{0}", "{87}!{0}", "|87| 0", r"7 0\text{\begin}", r"7 0\mbox{\begin}"),
    ("0", r"7 0\begin{vmatrix}1\end{vmatrix}", r"{7}{0}\text{\begin}", r"{7}{0}\mbox{\begin}"),
    ("0", r"{7}{0}\begin{vmatrix}1\end{vmatrix}", r"\begin{vmatrix}1\end{vmatrix}7 0"),
    ("0", r"\begin{vmatrix}1\end{vmatrix}7\quad 0", r"7\quad(0)", r"7\quad|0|", r"7\quad\lfloor0\rfloor"),
    ("0", r"7\quad\times 0", r"7\quad\frac{0}{1}", "7\n(0)", "7\n|0|", "7\n\\lfloor0\\rfloor", "7\n\\times 0"),
    ("0", "7\n\\frac{0}{1}"),
    ("548", "13 535"),
    ("13", "5 8", r"5\frac81", r"5\cfrac{8}{1}", r"5{\frac{8}{1}}", r"5\,\frac{8}{1}", r"5\left(\frac{8}{1}\right)"),
    ("12", "It is not 12", r"12 \text{ or not}", r"12 \text{ (or 13)}", r"12\text{ m}/\pi^{2}"),
    ("12", r"12\text{ m} \lor \text{XV m}", r"12\text{ m}\pm{x}", r"\text{Candidates 10, 11 and} = 12"),
    ("12", r"\text{11 and} = 12", r"\text{anything besides} = 12", r"x(\text{not 12}) = 12"),
    ("2x", "7 = 2x", r"2x \approx 8"),
    ("5", r"5 \approx 0", "5 ~= 7", r"[5, 4) \cup \{5\}", "not = 5", "isn't = 5", "never = 5", "I give up = 5"),
    ("5", r"\text{maybe} = 5", r"\text{7 or} = 5", r"x \not = 5", "no x = 5", "if x = 5", r"\neg x = 5"),
    ("5", r"\nexists x = 5", r"x \not= 5", "x != 5", "x =/= 5", r"x \not\approx 5", "x isn't 5", "x is not 5"),
    ("5", r"5\text{ probably}", r"5\text{ minus one}", r"5\text{ rejected}", r"5\text{ plus one}"),
    ("5", r"5\text{ isn't it}", r"5\text{ etc.}", r"5\text{ cm}, \{\}", r"5\text{ cm}\cdot\sqrt{x}", "3\n+2"),
    ("5", r"10\quad/2", r"3\\+2", r"5\text{ to six}", r"5\text{ less than}", r"5\text{ as well as six}"),
    ("5", r"5\text{ point five}", r"5\text{ squared}", r"5\text{ at most}", r"\text{7:} \approx 5"),
    ("5", r"x_{\text{seven or eight}} = 5", r"\text{nоt} = 5", r"\boxed 5/6", r"\boxed 5 + 3", r"\boxed 5\frac12"),
    ("5", r"\boxed 5^{10}", r"\boxed 5x", r"\boxed 5!", r"\boxed 5\pi", r"\boxed 5 000", "7x = x = 5"),
    ("5", "f(x) = x^2 = x = 5", "y = 2x = x = 5", "doesnt = 5", r"5 \approx 5\text{ cm} + {x}"),
    ("9600", r"9600 \approx 9640"),
    ("x=5", r"x = 5 \cdot \frac{a}{a}", "5=5"),
    (r"\approx 8.24\text{ mph}", r"not \approx 8.24", r"\text{not} \approx 8.24", r"\not \approx 8.24"),
    (r"\approx 8.24\text{ mph}", r"\text{7 or} \approx 8.24"),
    ("0,-1", r"7\ $0,-1$", "7 $0,-1$", "7~$0,-1$", "7$ $$0,-1$", r"7\text{ } $0,-1$", r"7\, $0,-1$"),
    ("$0,-1$", r"\text{7 or } $0,-1$", r"\text{I give up, } $0,-1$", r"\text{maybe} $0,-1$"),
    ("$x=0,1$", "not $x=0,1$"),
    ("1, 2, 4", "$1$, $2$, $3$ or maybe $4$", r"$1$, $2$, $3$ \text{ or maybe } $4$", "$1$, $2$, $3$ not $4$"),
    ("1, 2, 4", r"$1$, $2$, $3$ \  $4$"),
    ("56", "5$ $6", "5 $ 6", r"5\$6", "5€6", r"5\phantom{x}6", r"5\,6"),
    ("11", r"5 \- 6", r"5\*6", r"5\=6", r"5 \and 6", r"5\text{ }6", r"5\hfil 6", "5\\\n6"),
    ("4", r"\boxed{3} or \boxed{4}", r"\boxed{3}, \boxed{4}", r"\boxed{3}\boxed{4}", "x : x = 4", r"\{{x} : x=4\}"),
    ("x+3", "x+3d"),
    ("6", r"2\quad 3\begin{vmatrix}1\end{vmatrix}"),
    (r"\begin{pmatrix}6&1\\1&1\end{pmatrix}", r"\begin{pmatrix}1 2 3&1\\1&1\end{pmatrix}"),
    (r"\begin{pmatrix}6&1\\1&1\end{pmatrix}", r"\begin{pmatrix}2\,3&1\\1&1\end{pmatrix}"),
    (ZEROS, r"5 \quad\begin{pmatrix}0&0\\0&0\end{pmatrix}", r"\begin{pmatrix}0&0\\0&0\end{pmatrix}7"),
    (ZEROS, r"\begin{pmatrix}5 \quad 0&0\\0&0\end{pmatrix}"),
    (r"(-\infty,\infty)", r"\lbrack-\infty,\infty\rbrack", r"[{-\infty},{\infty}]", r"[-\,\infty,\infty)"),
    (r"(-\infty,2)", r"-\infty,2"),
    ("3", r"3\mathrm{e}", r"3\text{π}", r"3\text{ pi}", r"3\mathrm{x}", r"3\text{ x}"),
    (r"\text{A}", r"A\text{ B C D E}", r"(A)\text{ B}"),
    (r"\text{east}", "east west", "east cm"),
    ("x>2", r"x>2\text{ I think}"),
    (r"\text{even}", r"even\text{ odd}"),
    ("x^2", r"x^2\text{ cubed}", "y=x^3=x^2", "f(x)=2x=x^2", "x^2'"),
    ("(1,2)", "(3,4)=(1,2)", "x=(3,4)=(1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}3\\4\end{pmatrix}=\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\$18.90", "€18.90"),
    ("8:34", "4:17", "8:43", r"\text{8:34}, 5"),
    (r"8\!:\!34 \text{ p.m.}", "8:34 a.m.", "0.235294"),
    (r"0.56 = 56\%", "1=2", r"0.56 = 56\%\mathrm{e}"),
    ("9", r"\left(4\right)\left(5\right)", "4[5]", "{4}(5)", r"\frac{8}{2}(5)", "(4)((5))"),
    ("216", r"\binom{10}{4}\binom{4}{2}"),
    (r"\frac{97}{16}", r"(6)(\frac{1}{16})"),
    ("2.5", r"(2)\frac12"),
    ("2.88e-19", "2.88e-17", r"2.88\times10^{-21}"),
    ("1:2:3", r"\frac16", "1:3:2", "1:2:3:1"),
    ("3:5", "3:5:1"),
    (r"4\!:\!51\!:\!06 \text{ p.m.}", r"\frac{2}{153}", "4:51", "4:51:06 a.m."),
    (r"\sin x", r"\sin' x"),
    ("f(x)=x^2", "f'(x)=x^2"),
    ("1<x<2", "1,2", "x=1,2"),
    (r"$x=\pi k, x=2$", r"f(x) = 7x^7 = $x=\pi k, x=2$"),
]


@pytest.mark.parametrize(("gold", "answer"), pairs(RIGHT))
def test_right_answers_in_other_notations(gold, answer, reward):
    assert score(reward, gold, answer) == 1.0


@pytest.mark.parametrize(("gold", "answer"), [*pairs(WRONG), ("1.41", r"\sqrt{2} \approx 1.41")])
def test_free_points_are_none(gold, answer, reward):
    assert score(reward, gold, answer) == 0.0


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("2x^2 + 3y^2 = d", "3y^2 + 2x^2 = d", "3"),
        ("6m", r"m \cdot 6", "6"),
        (r"\frac{1}{m} t", r"\frac{t}{m}", r"\frac{1}{m}"),
        ("2ab", "2ba", "2"),
        (r"m\left(\gamma^{2}-1\right)", r"m(\gamma-1)(\gamma+1)", r"m(\gamma^2-2)"),
        (r"\frac{2}{4}x", r"\frac{x}{2}", "x"),
        ("2.5x=7.6", "7.6=2.5x", "7.6"),
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
