r"""Notations that mean the same, in the one form that Math-Verify reads: thousands, mixed numbers, fonts, Unicode.

This runs in the trainer's process, outside every time limit: every step takes time that is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from basis_rl.rewards.extract import plain_number
from basis_rl.rewards.math.spelled import in_notation

SPACE = r"(?:\s|~|\\[ ,;:>!]|\\q?quad(?![a-zA-Z])|\\(?:thin|med|thick)space(?![a-zA-Z]))"
FONT = r"\\(?:(?:math|text)(?:bf|rm|it|sf|tt|normal)|text|mbox|textnormal|boldsymbol|bm|pmb)"
_LONGEST = 10_000
_BLANKS = re.compile(rf"\s{{2,}}+|{SPACE}{{4,}}+")
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?|[a-zA-Z]", re.ASCII)

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "•": r"\cdot ", **dict.fromkeys("÷∕", "/"),
        "π": r"\pi ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "±": r"\pm ", "∅": r"\emptyset ", "°": r"^\circ ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "∶": ":", "\u00a0": " ", "\u2009": " ",
        "\u202f": " ", **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
        # Full-width forms, and Chinese punctuation.
        **{chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}, "、": ", ", "。": ".",
        "或": " or ", **dict.fromkeys("和且与と及", " and "),
        "∨": r"\lor ", "∧": r"\land ", "→": r"\to ", "↦": r"\mapsto ", "⟨": r"\langle ", "⟩": r"\rangle ",
        "⩽": r"\le ", "⩾": r"\ge ", "ℝ": r"\mathbb{R}", "≡": r"\equiv ",
        # Cyrillic.
        **dict(zip("аеорсухіАЕОРСХ", "aeopcyxiAEOPCX", strict=True)),
    }
)  # fmt: skip
_AMOUNTS = {
    "hundred": 2, "thousand": 3, "万": 4, "lakh": 5, "million": 6, "crore": 7, "亿": 8, "billion": 9, "trillion": 12,
}  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉", "0123456789-0123456789")

# What is stripped from the ends, and what may stand around the whole answer: quotation marks, a font, a colour, braces.
_LEADING = re.compile(
    rf"(?:{SPACE}|\\(?:displaystyle|textstyle|[lL]arge|LARGE|[hH]uge|therefore|Rightarrow|implies)(?![a-zA-Z])|=(?![=/])|\*"
    r"|\\color\s*\{[a-zA-Z]+\})*+"
)
_TRAILING = re.compile(
    rf"(?:{SPACE}|\\+|(?<![.\\\s])(?<![a-zA-Z]\.[a-zA-Z])\s*[.,;]|(?<!\^)\*+|\\(?:text|mbox)\{{\s*[.,;]?\s*\}})\Z"
)
_LONGEST_END = 16
# Every quantifier is possessive: no text is read twice.
_LEAD = re.compile(
    rf"\A[\s*_>]*+(?:{FONT}\s*\{{\s*+)?+(?:(?:so|thus|therefore|hence)\b[\s,]*+)?+(?:(?:the|my)\s++)?+"
    r"(?:(?:final|correct)\s++)?+(?:answer\b[\s*_]*+(?:is\b|[:=])?+[\s*_:]*+|答案?[是为]?\s*+:?+)\}?[\s*_:=]*+(?=\S)",
    re.IGNORECASE,
)
_QUOTED = re.compile(
    r"(?P<mark>__|`|\$\$?|['\"])((?:(?!(?P=mark)).)+)(?<!\\)(?P=mark)|\\\((.*)\\\)|\\\[(.*)\\\]",
    re.DOTALL,
)
_WRAPPER = re.compile(rf"(?:({FONT}|\\boxed|\\fbox|\\underline|\\textcolor\s*\{{\w+\}})\s*)?(?=\{{)")
_MOST_WRAPPERS = 8
_STOP_IN_TEXT = re.compile(rf"({FONT}\s*\{{[^{{}}]*[^{{}}.\s])(?<![a-zA-Z]\.[a-zA-Z])\.\s*\}}\Z")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)

_NOT_ROUND = re.compile(r",(?!\s|0\d\d(?!\d))")
# Letters that are no units.
_VARIABLE = r"[abcefiknopqrxyzuvBDEGIOPQRSUXYZ]|\\?pi(?![a-zA-Z])"
_BETWEEN = rf"(?:{SPACE}|[,;])*"
_MATH_FONT = r"\\math(?:bf|rm|it|sf|normal)\s*"
_FUNCTION = r"(?<![a-zA-Z\\])(sqrt|gcd|lcm|ln|log|lg|exp|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc)"
_MODULO = rf"(?:\\b?mod(?![a-z])|(?:{FONT}|\\operatorname)\s*\{{\s*mod\s*\}}|(?<![a-zA-Z\\])mod(?![a-z]))"
_INSIDE = r"(?:[^{}]|\{[^{}]*\})"
_RELATION = r"(?:<|>|\\[lg]e(?:q|qslant)?(?![a-z]))"
_OPEN = (r"(-\infty", r"\infty)")
# A name, and what it is the derivative of.
_BARE = r"\{?(\\?[a-zA-Z]+)\}?(_\w|_\{\w+\})?"
_NAME = rf"{_BARE}(?:\(\\?[a-z]+\))?"
_D = r"(?:d|\\mathrm\s*\{d\})\s*"
_SQUARE = r"(?:\^\s*(?:2|\{2\}))"
_PREFIXES = {"b": 2, "o": 8, "x": 16}
_AS_LETTERS = str.maketrans("0123456789", "abcdefghij")
# "and" and "or" in other languages.
_JOINED = {
    "und": "and", "et": "and", "y": "and", "e": "and", "и": "and", "oder": "or", "ou": "or", "o": "or", "u": "or",
    "или": "or",
}  # fmt: skip
_JOINS = "|".join(word for word in _JOINED if len(word) > 1 or word == "и")
_SETS = r"\\in\s*(?:\\mathbb\s*)?\{?[A-Z]\}?(?:_\{?[^{}\s]+\}?|\^\{?[+*]\}?)?"
_VALUE = r"(?=-?\d|\\|\(|[a-z]\w*\s*=)"
# Behind a single letter, which is a variable in 3 y \le 6 and 3 e \pi.
_OTHER_VALUE = r"(?=-?\d|\\[dt]?frac\s*\{\d|[a-z]\w*\s*=)"
_DEGREE = r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))"
_GROUP = r"(?:\((?:[^()]|\([^()]*\))*\)|\{(?:[^{}]|\{[^{}]*\})*\})"


def _rate(name: str, index: str | None, is_second: bool) -> str:
    """The name of the first or second derivative of a name with its index."""
    # A number beside a letter would be refused.
    name = re.sub(r"\W|_", "", name + (index or "")).translate(_AS_LETTERS)
    return rf" D_{{{'dd' if is_second else 'd'}{name}}}"


def _rate_of(match: re.Match[str]) -> str:
    """That of groups 2 and 3; the second one if group 1 is there."""
    return _rate(match[2], match[3], bool(match[1]))


_EITHER = rf"(?:(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|{FONT}\s*\{{\s*,?\s*(?:and|or)\s*\}})"


def _amount(match: re.Match[str]) -> str:
    r"""``2.5 million`` as a product, and the text that goes on behind the word."""
    factor = rf"\cdot 10^{{{_AMOUNTS[match[2]]}}}" if match[2] in _AMOUNTS else r"\cdot 12"
    return factor + ((match[1] or "") if not match[3] else "" if match[1] else match[3])


# Applied in this order; a function computes what replaces the match.
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), form)
    for pattern, form in (
        # Numerals and fractions in other characters.
        (r"(?![0-9])\d", lambda m: str(int(m[0]))),
        (r"([⁰¹²³⁴-⁹]+)⁄([₀-₉]+)", lambda m: rf"\frac{{{m[1].translate(_RAISED)}}}{{{m[2].translate(_RAISED)}}}"),
        (r"[₀-₉]+", lambda m: f"_{{{m[0].translate(_RAISED)}}}"),
        (r"(?<=\d)['’](?=\d{3})", ""),
        (r"⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}"),
        (rf"{FONT}\s*\{{(?:\s*,?\s*({_JOINS})\s*|\s+([yeo])\s+)\}}", lambda m: rf"\text{{ {_JOINED[m[1] or m[2]]} }}"),
        (
            rf"(?<=[\d)}}\]$])\s*,?\s(?:({_JOINS})\s\s*{_VALUE}|([yeou])\s\s*{_OTHER_VALUE})",
            lambda m: f" {_JOINED[m[1] or m[2]]} ",
        ),
        (r"\\(?:(lor|vee)|land|wedge|&)(?![a-z])", lambda m: " or " if m[1] else " and "),
        (rf"(?<=\d)\s*(?:{FONT}\s*\{{\s*to\s*\}}|\sto\s)\s*(?=\d)", ":"),
        (r"\\begin\s*\{cases\}(.*)\\end\s*\{cases\}", lambda m: ", ".join(re.split(r",?\s*\\\\", m[1]))),
        # Decimal commas in LaTeX; numerals in a font; what ends a proof.
        (r"(?<=\d)\{,\}(?=\d{1,2}(?!\d)|\d{4})", "."),
        (rf"(?<!\d){FONT}\s*\{{(-?[\d.,]+)\}}(?!\s*\d)", r"\1"),
        # A matrix as a program writes it.
        (
            r"(?<![^=\s])(?:Matrix\(|(?:np\.)?array\()?\[\s*(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*)\s*\]\)?$",
            lambda m: _matrix(m[1]),
        ),
        (r"^\[([-\d./][-\d./\s]*(?:;\s*[-\d./][-\d./\s]*)+)\]$", lambda m: _matrix(_in_brackets(m[1]))),
        # Intervals with brackets turned around, and half-lines by name.
        (
            r"\](?=[^\[\]()]*[,;][^\[\]()]*[\[\]])((?:[^,;\[\]()]|\\[,;])*[,;][^\[\]()]*)([\[\]])",
            lambda m: f"({m[1]}{')' if m[2] == '[' else ']'}",
        ),
        (r"(?<![\w\\}])(\[[^\[\]()]*[,;][^\[\]()]*)\[", r"\1)"),
        (
            r"\\mathbb\s*(?:\{R\}|R)\s*(?:(?:_\s*\{?0\}?)?\^\s*\{?([+-])\}?(_\s*\{?0\}?)?|_\s*\{?\s*(?:([+-])|(>|<|\\[lg]e(?:q|qslant)?)\s*0)\s*\}?)",
            lambda m: _half_line(m[0]),
        ),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        # An extremum by its name; a function by its rule.
        (
            r"^\s*(?:\\(?:max|min|sup|inf)(?![a-z])(?:_\{[^{}]*\}|_\w)?(?=[^=]*[a-zA-Z])"
            r"|[a-zA-Z]\s*_\s*\{?\s*\\?(?:text\{)?(?:max|min))[^=<>\d]*=",
            "M =",
        ),
        (r"^([a-zA-Z])\s*:\s*([a-z])\s*\\mapsto\s*", r"\1(\2) = "),
        # Derivatives in all their notations are one name.
        (
            rf"\\[dt]?frac\s*\{{\s*{_D}({_SQUARE})?\s*{_NAME}\s*\}}\s*\{{\s*{_D}\s*\\?[a-z]+\s*{_SQUARE}?\s*\}}",
            _rate_of,
        ),
        (rf"(?<![a-zA-Z\\])d()\s*{_NAME}\s*/\s*d\s*[a-zA-Z](?![a-zA-Z])", _rate_of),
        (rf"\\(d)?dot(?![a-z])\s*{_NAME}", _rate_of),
        (
            rf"(?<![a-zA-Z\\]){_BARE}('{{1,2}}|\s?\^\s?\{{?(?:\s?\\prime){{1,2}}\s?\}}?)(?:\([a-z]\)|(?![(\w]))",
            lambda m: _rate(m[1], m[2], len(m[3]) > 1 and m[3].count("'") + m[3].count("prime") == 2),
        ),
        (r"(?s)^.*D_\{d.*$", lambda m: re.sub(r"(?<=[a-zA-Z}])\(t\)", "", m[0])),
        # Degrees in a function, and cis.
        (
            r"(?s)^.*(?:\\?(?:sin|cos|tan|cot|cis)(?![a-z])|\\(?:text|operatorname|mathrm)\s*\{\s*cis\s*\}).*$",
            lambda m: re.sub(rf"(\d+(?:\.\d+)?)\s*{_DEGREE}", r"(\\frac{\1\\pi}{180})", m[0]),
        ),
        (
            rf"(?:\\(?:text|operatorname|mathrm)\s*\{{\s*cis\s*\}}|(?<![a-zA-Z])\\?cis)\s*({_GROUP}|\\[dt]?frac{_GROUP}{_GROUP}|\S+$)",
            r" e^{{i \1}}",
        ),
        # Numbers of choices.
        (
            r"(?<![a-zA-Z\\])C\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)|(?:\{\}\s*)?[_^]\s*\{?([a-zA-Z\d]{1,9})\}?\s*C\s*_\s*\{?([a-zA-Z\d]{1,9})\}?|(?<![\w.])(\d+)C(\d+)(?!\w)",
            lambda m: r"\binom{{{}}}{{{}}}".format(*filter(None, m.groups())),
        ),
        (r"(?<![a-zA-Z\\])log_?(\d+)(?=\s*\()", r"\\log_{\1}"),
        # Times of day.
        (r"^(\d{1,2})\s*(?:[.:]\s*(\d\d)\s*Uhr|\s*h\s*(\d\d))$", lambda m: f"{m[1]}:{m[2] or m[3]}"),
        (r"\\([lr])brack(?![a-zA-Z])\s*", lambda m: "[" if m[1] == "l" else "]"),
        (r":=|\\coloneqq(?![a-zA-Z])", "="),
        # The names of a ratio.
        (r"^[a-zA-Z][\w{}]*(?:\s*:\s*[a-zA-Z][\w{}]*)+\s*=\s*(?=[\d\\(][^=]*:)", ""),
        (r"\\[bB]igg?[lrm]?(?![a-zA-Z])\s*", ""),
        # Rows of a matrix with a distance.
        (r"\\\\\s*\[[\d.]+\s*[a-z]{2}\]", r"\\\\ "),
        # A matrix as an array in brackets, a vector in angles.
        (r"(?:(?:\\left\s*)?[\[(]\s*)?(?<!\|)\\begin\s*\{array\}\s*\{[^{}]*\}", r"\\begin{pmatrix}"),
        (r"(?:\\left\s*)?[\[(]\s*\\begin\s*\{matrix\}", r"\\begin{pmatrix}"),
        (r"\\end\s*\{(?:array|matrix)\}(?:\s*(?:\\right\s*)?[\])])?", r"\\end{pmatrix}"),
        (r"(\([^()]*,[^()]*\))\s*\^\s*\{?\s*(?:T|\\top)\s*\}?$", r"\1"),
        (
            r"(?:\\left\s*)?\\langle(?![a-z])([^|]{0,200}?)(?:\\right\s*)?\\rangle(?![a-z])|^<([^<>]*,[^<>]*)>$",
            r"(\1\2)",
        ),
        # As a calculator or a program writes.
        (r"(?<=[\w)\]}])\s*\*\*\s*(?:(-?\w+)|(?=[({]))", lambda m: f"^{_braced(m[1])}"),
        (_FUNCTION + r"(?=\s*[\d(|{\\^_]|\s+[a-z](?![a-z]))", r"\\\1"),
        (r"\\sqrt\s*\(((?:[^()]|\([^()]{0,200}\)){0,200})\)", r"\\sqrt{\1}"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\lg(?![a-z])", r"\\log_{10}"),
        (r"\\log\s*_\s*e(?![a-zA-Z])", r"\\ln "),
        # A residue; the name before it.
        (rf"{SPACE}{{0,4}}(?:{FONT}\s*\{{{SPACE}*)?\({SPACE}*{_MODULO}{SPACE}*(\w+){SPACE}*\)\s*\}}?$", r"\\pmod{\1}"),
        (r"\\pmod\s*(\w)$", r"\\pmod{\1}"),
        # For whom an answer holds, where that is for all; its value in brackets.
        (
            rf"[,;]?{SPACE}*(?:\\forall(?![a-z])|(?:{FONT}\s*\{{\s*)?,?\s*(?:for (?:all|any|every|each))"
            r"(?:\s+(?:real|complex|positive|nonnegative|natural|rational|integers?|numbers?|values?|of|\$?[a-z]\$?))*\s*\}?)"
            rf"{SPACE}*(?:[a-zA-Z]|\\[a-z]+)?(?:\s*(?:{_SETS}|{_RELATION}\s*0))?$",
            "",
        ),
        (rf"(?<=\S)[,;]{SPACE}*(?:{FONT}\s*\{{\s*)?(?:where\s*\}}?{SPACE}*)?[a-z]\s*{_SETS}$", ""),
        (r"(?<=\\mathbb\{R\})\s*-\s*(?=\\\{)", r" \\setminus "),
        # A value of a function; a function that is a constant.
        (r"^([a-zA-Z]\s*\([^()=]*\))\s*\\approx(?:eq)?(?![a-z])", r"\1 ="),
        (r"^([a-zA-Z](?:\([a-z]\))?)\s*\\equiv(?![a-z])", r"\1 ="),
        (r"([\[(]\s*[^\[\]();]*)(?<!\\);(?=[^\[\]();]*[\])])", r"\1,"),
        (
            rf"(?i)^(?:{FONT}\s*\{{\s*)?(?:the\s)?(?:all\s|any\s|every\s)?(?:(?:real|positive|natural|integers?|numbers?|values?|of|all)\s+)+\}}?"
            rf"{SPACE}*(?:[a-z]{SPACE}*(?:{FONT}\s*\{{\s*)?(?:with|such that|for which|where)\s*\}}?{SPACE}*)?"
            rf"(?=[a-z]{SPACE}*(?:{_RELATION}|=|\\in))|^{FONT}\s*\{{\s*all\s*\}}",
            "",
        ),
        (rf"(?:\\left\s*)?\({SPACE}*(=|\\approx(?![a-z]))([^()]*?)(?:\\right\s*)?\)$", r" \1\2"),
        # The set of all that fulfil an inequality, two inequalities as one or as a union.
        (
            rf"^(?:\\left)?\\\{{{SPACE}*([a-zA-Z])(?:\s*\\in\s*\\mathbb\s*\{{?R\}}?)?{SPACE}*(?:\||:|\\mid(?![a-z])|\\colon(?![a-z]))"
            rf"{SPACE}*((?=[^|]*(?:[<>]|\\[lgn]e))[^=|:]*?)(?:\\right)?\\\}}$",
            r"\2",
        ),
        (r"(?s)^.*(?:[<>]|\\[lg]e).*$", lambda m: _together(m[0])),
        # The name of a probability; its event may be a text that denies, P(\text{not red}) = ...
        (r"^(?:\\(?:mathbb|operatorname)\s*\{)?([EP])\}?\s*[(\[][^()\[\]]*[)\]]\s*(?==)", r"\1"),
        # What stands behind an answer without being part of it.
        (
            r"(?<![.\s])[.\s]*+(?:\\q?quad)?\s*+(?:\\tag\s*\{[\w*]{1,4}\}|\\(?:checkmark|blacksquare|square|qed|Box)(?![a-zA-Z])|[■□∎✓])\s*$",
            "",
        ),
        # A factorial before an equals sign, since the parser knows != alone; and the power of one.
        (r"(?<=[\d)}\]])!=(?!=)", "! ="),
        (r"((?<!\w)\w++!|\([^()!]*\)!)\s*\^", r"(\1)^"),
        # As Python prints.
        (r"^Fraction\((-?\d+),\s*(\d+)\)$", r"\\frac{\1}{\2}"),
        # Not that of a vector, 3i + 2j.
        (r"(?s)^(?!.*(?<![a-zA-Z])[ik](?![a-zA-Z])).*$", lambda m: re.sub(r"(?<=\d)j(?![a-zA-Z])", "i", m[0])),
        # A base.
        (r"^0([box])([0-9a-fA-F]+)$", lambda m: f"{m[2]}_{{{_PREFIXES[m[1]]}}}"),
        (rf"^(?:\(|{FONT}\s*\{{)\s*([0-9A-F]+)\s*[)}}]\s*_", r"\1_"),
        (rf"(?<=[0-9A-F]){SPACE}*(?:{FONT}\s*\{{{SPACE}*)?\(?\s*base(?:{SPACE}|\}})*(\d+)\s*\)?\s*\}}?$", r"_{\1}"),
        # Several choices in one text.
        (
            rf"^{FONT}\s*\{{((?:\(?[A-H]\)?\s*(?:,|and|&)\s*(?:and\s*)?)+\(?[A-H]\)?)\s*\}}$",
            lambda m: ", ".join(re.findall(r"[A-H]", m[1])),
        ),
        (
            rf"(?<=[^\s,;~:!>\\]){SPACE}*+[,;]?{SPACE}*{FONT}\s*\{{{_BETWEEN}(?:[,;]|and|or){_BETWEEN}\}}{SPACE}*(?=[^\s,;.])",
            ", ",
        ),
        # Amounts, money, percentages, minutes and seconds of an angle.
        (
            rf"(?<=[\d}}]){SPACE}*({FONT}\s*\{{\s*)?(hundred|thousand|lakh|million|crore|billion|trillion|dozen|万|亿)s?(?![a-zA-Z])\s*(\}}?)",
            _amount,
        ),
        (r"(\\\$\s*\d[\d,.]*|\d\.\d+)[kK]$", r"\1\\cdot 10^{3}"),
        (rf"^(?:₹|(?:{FONT}\s*\{{\s*)?Rs\b\.?{SPACE}*\}}?){SPACE}*(\d[\d,.]*)$", r"\1\\text{ rupees}"),
        (rf"({FONT}\s*\{{\s*)?(?:\\?%|\b(?:per ?cent|Prozent|pour ?cent|por ciento)\b)(?(1)\s*\}})", r"\\%"),
        (
            rf"^(\d{{1,9}})\s*\^\s*\{{?\s*\\circ\s*\}}?{SPACE}*(\d{{1,9}})\s*(?:'|\^\s*\{{?\s*\\prime\s*\}}?){SPACE}*(?:(\d{{1,9}})\s*(?:''|\"))?$",
            lambda m: rf"\frac{{{3600 * int(m[1]) + 60 * int(m[2]) + int(m[3] or 0)}}}{{3600}}^\circ",
        ),
        # Of the sun.
        (rf"(?<=\d){SPACE}*[LMR]\s*_\s*\{{?\s*\\odot\s*\}}?$", ""),
        # Letters that are none of units, in a font.
        (r"\\(?:math(?:bf|rm|it|sf)|vec|boldsymbol)\s+([a-zA-Z])(?![a-zA-Z])|\\vec\s*\{([a-zA-Z])\}", r"\1\2"),
        (rf"(?:(?!^)|(?={_MATH_FONT}\{{[^{{}}]*\}}\s*\S)){_MATH_FONT}\{{\s*({_VARIABLE})\s*\}}", r" \1 "),
        (r"\\mathrm\s*\{d\}(?=[a-z\\])", "d"),
        (rf"(?<=\d)\s*\^\s*(?:\{{\s*)?(?:{FONT}\s*\{{\s*)?(?:st|nd|rd|th)\s*\}}+", ""),
        (r"\^?\s*\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"(?<=\d)\s+x\s+(?=10\s*\^)", r"\\times "),
        (rf"(?:\{{|^)({_INSIDE}*?)\\over(?![a-zA-Z])({_INSIDE}*)(?:\}}|$)", r"\\frac{\1}{\2}"),
        (rf"(?:\{{|^)({_INSIDE}*?)\\choose(?![a-zA-Z])({_INSIDE}*)(?:\}}|$)", r"\\binom{\1}{\2}"),
        (r"(\\[dt]?(?:frac|binom))\s*(\d)\s*(\d)(?!\d)", r"\1{\2}{\3}"),
        (r"√\s*(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\)|(?=\{))", lambda m: rf"\sqrt{_braced(m[1] or m[2])}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"^((?:[^=<>a-zA-Z\\]|\\(?:[dt]?frac|sqrt|pi|cdot|pm)(?![a-zA-Z])|\\[ ,])*+)=\s*([a-zA-Z])$", r"\2=\1"),
        (r"(^|=\s*)([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?=$|[\s\\])", r"\1\2\\cdot 10^{\3}"),
        # Thousands, mixed numbers, periods.
        (
            rf"(?<![\d.,])(?<!\d\s)(?<!\\[ ,;:])([1-9]\d{{0,2}})((?:{SPACE}|\{{,\}})+)(\d{{3}})(?:\2(\d{{3}}))*"
            rf"(?!\d|,\d|(?:{SPACE})+\d)",
            lambda m: re.sub(r"\D", "", re.sub(SPACE, "", m[0])),
        ),
        (
            r"(^|[=$+*/(]|(?<![\\_])\{|,\s|\\(?:approx|cdot|times)(?![a-zA-Z])|\b(?:and|or)\b)(\s*[-+]?\s*)"
            r"([1-9]\d{0,2}(?:(?:,|\{,\}|,\\!)\d{3})+)(?=$|[^\d,]|,\s)",
            lambda m: m[1] + m[2] + _joined(m),
        ),
        (
            r"(?<![\d.,])(\d{0,20})\.(\d{0,20}?)(?:\\(?:overline|bar|dot)\s*(?:\{(\d{1,20})\}|(\d))|\((\d{1,20})\)"
            r"|(\d{1,6}?)\6{2,}\s*(?:\.\.\.|…|\\[lc]?dots))(?!\s*[\d\\])",
            lambda m: _repeating(m),
        ),
        (rf"(?<![\d./,}}])(\d{{1,9}}){SPACE}+(\d{{1,9}})\s*/\s*(\d{{1,9}})(?![\d./(])", lambda m: _mixed(m)),
        (r"(?s)^.*\\(?:pm|mp)(?![a-z]).*$", lambda m: _both_signs(m[0])),
    )
)


def normal_form(text: str) -> str:
    r"""The same answer in notations that Math-Verify reads.

    Blanks, Markdown's asterisks, dollar signs, fonts, colours and a full stop around it go; ``\mathbf{42}`` is 42,
    ``√5`` a root, ``1 1/2`` a mixed number, ``0.\overline{3}`` a third; ``12\,000``, ``12 000`` and ``x=12,000`` are
    thousands, ``\varnothing`` is the empty set, ``2(3)`` a product, ``\text{, and }`` a comma, ``5 = x`` is ``x = 5``.
    Texts of more than 10,000 characters stay as they are.
    """
    if len(text) > _LONGEST or _PLAIN.fullmatch(text):
        return text
    # Longer runs of blanks, which models write in loops, would make the rewrites slow.
    text = _BLANKS.sub(lambda m: "\n" if "\n" in m[0] else " ", re.sub(r"~|\$\s*+\$", " ", text.translate(_CHARACTERS)))
    text = in_notation(bare(text))
    for pattern, form in _REWRITES:
        text = pattern.sub(form, text)
    return bare(text)


def text_form(text: str) -> str:
    """A normal form without insignificant blanks and braces, for the comparison of texts that are not formulas."""
    text = re.sub(r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2", " ".join(text.split()))
    return re.sub(r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])", "", re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text))


def bare(text: str) -> str:
    """The answer without what stands around it; each of a bounded number of steps is linear."""
    for _ in range(_MOST_WRAPPERS):
        text = _STOP_IN_TEXT.sub(r"\1}", _trimmed(_LEAD.sub("", text, count=1)))
        quoted = _QUOTED.fullmatch(text)
        inside = next((part for part in quoted.groups()[1:] if part is not None), None) if quoted else _unwrapped(text)
        if inside is None:
            break
        text = inside
    return text


def _trimmed(text: str) -> str:
    leading = _LEADING.match(text)
    start = leading.end() if leading else 0
    end = len(text)
    while match := _TRAILING.search(text, max(start, end - _LONGEST_END), end):
        end = match.start()
    return text[start:end]


def _unwrapped(text: str) -> str | None:
    r"""What is in the braces around all of the text, None if there are none; words in a font stay in it."""
    wrapper = _WRAPPER.match(text)
    if wrapper is None:
        return None
    depth = 0
    for brace in _BRACES.finditer(text, wrapper.end()):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            if brace.end() < len(text):
                return None
            inside = text[wrapper.end() + 1 : -1]
            font = wrapper[1] or ""
            if not re.fullmatch(FONT, font) or re.match(r"[-+.\s(\[$]*(?:\d|\\)", inside):
                return inside
            words = font in (r"\text", r"\mbox") or re.fullmatch(r"[a-zA-Z\s().,'-]*", inside)
            return None if words else inside
    return None


def _braced(text: str | None) -> str:
    return f"{{{text}}}" if text else ""


def _both_signs(text: str) -> str:
    """A list in which an element with one plus-minus sign stands as two: ``1 \\pm x`` as ``1 + x, 1 - x``."""
    braced = re.fullmatch(r"([a-zA-Z]\s*(?:\\in|=)\s*)?(?:\\left\s*)?\\\{(.*?)(?:\\right\s*)?\\\}\s*", text, re.DOTALL)
    if braced is not None:
        return rf"{braced[1] or ''}\{{{_both_signs(braced[2])}\}}"
    text = re.sub(rf"\s*{_EITHER}\s*", ", ", text)
    depth = 0
    parts = [""]
    for token in re.findall(r"\\.|.", text, re.DOTALL):
        depth += (token in "([{" or token == r"\{") - (token in ")]}" or token == r"\}")
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    signs = re.compile(r"\\(?:pm|mp)(?![a-z])\s*")
    both = [
        [signs.sub(sign, part) for sign in (" + ", " - ")] if len(signs.findall(part)) == 1 else [part]
        for part in parts
    ]
    return ",".join(re.sub(r"(^\s*|[=(,]\s*)\+ ", r"\1", part) for signed in both for part in signed)


def _half_line(text: str) -> str:
    """The interval of a set such as ``\\mathbb{R}_{>0}``."""
    below = re.search(r"-|<|\\le", text) is not None
    closed = re.search(r"\\[lg]e|\^.*0|0.*\^", text) is not None
    if below:
        return r"(-\infty,0" + ("]" if closed else ")")
    return ("[" if closed else "(") + r"0,\infty)"


def _in_brackets(rows: str) -> str:
    return ",".join(f"[{','.join(row.split())}]" for row in rows.split(";"))


def _matrix(rows: str) -> str:
    cells = [row.replace(",", "&") for row in re.findall(r"\[([^\[\]]*)\]", rows)]
    return r"\begin{pmatrix}" + r"\\".join(cells) + r"\end{pmatrix}"


def _together(text: str) -> str:
    r"""``x>1 and x<2`` as ``1<x<2``, ``x<1 or x>2``, ``x<1, x>2`` as a union of intervals; other forms stay."""
    words = {"or" in word for word in re.findall(rf"{_EITHER}|,", text)}
    parts = [_bounds(_trimmed(part)) for part in re.split(rf"{_EITHER}|,", text)]
    if not words or None in parts or len(words) > 1 or len({part[0] for part in parts if part}) > 1:
        return text
    known = [part for part in parts if part is not None]
    if words == {True}:
        return r"\cup ".join(f"{low or _OPEN[0]},{high or _OPEN[1]}" for _, low, high in known)
    lows = [low for _, low, _ in known if low]
    highs = [high for _, _, high in known if high]
    if len(lows) != 1 or len(highs) != 1:
        return text
    low = plain_number(lows[0][1:])
    high = plain_number(highs[0][:-1])
    # Together they would hold for no number, so the comma is an "or".
    if low is not None and high is not None and low >= high and not re.search(_EITHER, text):
        return rf"(-\infty,{highs[0]}\cup {lows[0]},\infty)"
    less = ["<" if mark in "()" else r"\le " for mark in (lows[0][0], highs[0][-1])]
    return f"{lows[0][1:]}{less[0]}{known[0][0]}{less[1]}{highs[0][:-1]}"


def _bounds(inequality: str) -> tuple[str, str, str] | None:
    """The letter of an inequality and its bounds as those of an interval, ``(1`` and ``2]``; an empty text for none."""
    sides = re.split(rf"\s*({_RELATION})\s*", inequality)
    if len(sides) not in (3, 5) or re.search("[=,;]", inequality.replace(r"\,", "")):
        return None
    at = next((i for i in range(0, len(sides), 2) if re.fullmatch("[a-zA-Z]", sides[i])), None)
    if at is None or (len(sides) == 5 and at != 2):
        return None
    low = high = ""
    for i in range(1, len(sides), 2):
        relation = sides[i]
        bound = sides[i - 1] if i < at else sides[i + 1]
        if (relation == "<" or relation.startswith(r"\l")) == (i > at):
            high = bound + (")" if relation in "<>" else "]")
        else:
            low = ("(" if relation in "<>" else "[") + bound
    return (sides[at], low, high) if len(sides) == 3 or (low and high) else None


def _joined(match: re.Match[str]) -> str:
    """The thousands as digits; in a list or a bracket only where all are round, ``1,000``, as ``(1,200)`` is a pair."""
    plain = match[3].replace("{,}", "").replace(r",\!", "")
    text = match.string
    listed = "," in (text[: match.start(2)] + text[match.end() :]).replace(r"\,", "") or match[1] == "("
    return plain if listed and _NOT_ROUND.search(text) else plain.replace(",", "")


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    return rf"{whole}\frac{{{top}}}{{{bottom}}}" if 0 < int(top) < int(bottom) else match[0]


def _repeating(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as a fraction: the digits less those before the period, by as many nines and zeros."""
    once = (match[1] or "0") + match[2]
    period = next(filter(None, match.groups()[2:]))
    return rf"\frac{{{int(once + period) - int(once)}}}{{{'9' * len(period)}{'0' * len(match[2])}}}"
