r"""What a text says to Math-Verify's parser, latex2sympy2_extended; loaded by the grading processes only.

All fixes of the parser are in this file. They concern products of numerals (which it reads as mixed numbers), the
imaginary unit, names that it reads as constants or functions, derivatives, words, and units.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode  # type: ignore[import-untyped]
from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy, normalize_latex  # type: ignore[import-untyped]
from math_verify.grader import should_treat_as_complex
from sympy import Basic, E, Expr, I, Integer, MatrixBase, Mul, Rational, Symbol, UnevaluatedExpr, evaluate, nan, pi, zoo  # type: ignore[import-untyped]

# Math-Verify's own settings for what is in a box, in two steps; units are read here.
_BASIC = NormalizationConfig(units=False, boxed="none")
_SPELLED = NormalizationConfig(basic_latex=False, malformed_operators=True, nits=True, boxed="none")
# To sympy dv/dt is 0, since v does not depend on t; E, e, I and i are constants, which have no index and are given no
# value; \gamma is the gamma function: all become symbols.
_INDEXED = re.compile(r"(?<![a-zA-Z\\])([EeIi])\s*_\s*(?:\{\s*(\w+)\s*\}|(\w))")
_NAMED = re.compile(
    r"(^|[,;]|\\text\{[^{}]*\})([\s$]*\|?\s*)([EeIi])(?=\s*(?:\||\([^()=]*\)|\[[^\[\]=]*\])?\s*(?:=|\\in(?![a-z])|\\approx))"
)
_GAMMA = re.compile(r"\\gamma(?!\s*_|[a-zA-Z])")
SIGNS = re.compile(r"^\s*(?:\\approx(?:eq)?(?![a-zA-Z])|≈)|[€£¥₹]")
MODULUS = re.compile(r"\s*\\pmod\{(\w+)\}$")
_SIGN = re.compile(r"\\(\$)|([€£¥₹])|^(\$)(?=[^$]*$)")
_BLANK = r"(?:\s|~|\\[ ,;:!>]|\\q?quad(?![a-zA-Z]))"
_TEXT = r"\\(?:text[a-z]*|mbox|math(?:rm|bf|it|sf|normal))\s*\{(?:[^{}]|\{[^{}]*\})*\}"
_SIGNS_OF_UNITS = r"\^\s*\{?\s*\\circ\s*\}?|\\circ(?![a-zA-Z])|\\?%|¢|\\(?:Omega|mu|per)(?![a-zA-Z])"
_LINK = rf"{_BLANK}|\\cdot(?![a-zA-Z])|/|\^\s*\{{?\s*-?\d\s*\}}?|[().-]"
_LETTERS = r"[^\W\d_]++"
# A number and what may be its unit: what begins with a text or a sign, or words without a font.
_QUANTITY = re.compile(
    rf"(?P<body>(?=.*?(?:\d|\\(?:pi|infty)(?![a-zA-Z]))).+?){_BLANK}*(?:"
    rf"(?P<unit>(?:{_TEXT}|{_SIGNS_OF_UNITS}|\\[td]?frac\s*\{{\s*{_TEXT}\s*\}}\s*\{{\s*{_TEXT}\s*\}})"
    rf"(?:{_TEXT}|{_SIGNS_OF_UNITS}|{_LINK}|{_LETTERS})*+)"
    rf"|(?<=[\d}})\s])(?P<words>{_LETTERS}(?:{_LINK}|{_LETTERS})*+))",
    re.DOTALL,
)
# Units and the words around them. Of Cyrillic letters, those that `notation` leaves.
_WORDS_OF_UNITS = Path(__file__).with_name("units.json").read_text("utf-8")
_VOCABULARY = json.loads(_WORDS_OF_UNITS.translate(str.maketrans("аеорсухі", "aeopcyxi")))
_POWERS, _RAISED, _PER = (_VOCABULARY[name] for name in ("powers", "raised", "per"))
_SIGNS_BY_COMMAND = {"circ": "degree", "Omega": "Ω", "mu": "µ", "per": "/"}


def _any_of(name: str) -> str:
    return f"(?:{'|'.join(_VOCABULARY[name])})"


# Things that are counted. Nouns are told by their form: an English, French or Spanish plural, a German capital, a
# Russian genitive, a Chinese measure word.
_PLURAL = (
    rf"(?:(?!(?:{_any_of('adverbs')}|\w*[usi]s)\b)[^\W\d_A-Z]{{3,}}s|{_any_of('nouns')}|[A-ZÄÖÜ][a-zäöüß]{{3,}}"
    r"|[а-яёa-z]*[а-яё][а-яёa-z]*(?:[oe]в|eй|oк))\b"
)
_MEASURE = f"[{_VOCABULARY['measures']}]"
_CHINESE_NOUN = rf"(?:[\u4e00-\u9fff](?<![{_VOCABULARY['no nouns']}])){{1,6}}"
_REST = re.compile(
    rf"(?!.*\b{_any_of('bounds')}\b)(?:{_any_of('after')}\b\s*)*"
    rf"(?:[a-z]{{2,}}(?:ed|ing)\b.*|{_any_of('opens')}(?= ).*|and {_PLURAL}|{_CHINESE_NOUN})?"
)
_COUNTED = re.compile(
    rf"(?:(?!{_any_of('no adjectives')}\b)[^\W\d_]{{2,}} ){{0,2}}(?P<noun>{_PLURAL})(?: (?P<rest>.*))?"
    rf"|(?P<measure>{_MEASURE})(?: ?{_CHINESE_NOUN})?"
)
# A text that is no unit; behind these signs the parser passes over it.
_DROPPED = re.compile(rf"(?:%|\\circ\s*\}}?){_BLANK}*{_TEXT}$")
# As the parser reads a sign of percent behind a numeral.
_HUNDREDTH = UnevaluatedExpr(Rational(1, 100))
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
_MIXED = re.compile(r"\d+\\[dt]?frac\{?(\d+)\}?\{?(\d+)\}?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORDS = re.compile(
    r"(\\(?:text|mbox)\s*\{\s*)?\(?((?!.*\b(?:inf|infinity|and|or)\b)(?=.*(?:[a-zA-Z]{3}|ii))[a-zA-Z ]+)\)?\s*(?(1)\})"
)


# Rollouts of one problem come together: its gold is parsed once.
@lru_cache(maxsize=256)
def readings(text: str, letters_are_units: bool = True) -> tuple[Any, ...]:
    """What a text may say, the likelier first: without its unit, and with all that stands in it.

    It is read as LaTeX or not at all. Math-Verify's other ways (the last number in the text, the last side of a chain
    that it cannot read) leave out the rest of it.
    """
    text = text.strip()
    if (words := _WORDS.fullmatch(text)) is not None:
        # Words without \\text{} are a product of letters, i among them; to Math-Verify inf is infinity in them.
        word = words[2].lower().replace(" ", "")
        letters = (E if letter == "e" else Symbol(letter, real=True) for letter in word)
        return (Symbol(word, real=True) if words[1] else Mul(*letters, evaluate=False),)
    body, unit = quantity(text)
    if unit is None and _DROPPED.search(text):
        return ()
    number = formula(body)
    if unit == _PERCENT and isinstance(number, Expr):
        return (number.doit() * _HUNDREDTH,)
    # The last letter of ``2x^2 + 3y^2 = d`` is no unit.
    tail = text[len(body) :].strip()
    is_letter = len(tail) == 1 and tail.isalpha() and (symbols(number) or not letters_are_units)
    found = [*([] if is_letter else [number]), *([formula(text)] if tail else [])]
    return tuple(reading for reading in found if reading is not None)


def formula(text: str) -> Any:
    """The expression of the content of a box, with its unit; see `_parsed`."""
    text = MODULUS.sub("", SIGNS.sub("", text))
    text = _INDEXED.sub(r"H_{\1\2\3}", _NAMED.sub(r"\1\2H_{\3}", text))
    text = _GAMMA.sub("H_{g}", text)
    return _parsed(_spelled(str(normalize_latex(text, _BASIC))))


def _spelled(text: str) -> str:
    return str(normalize_latex(text, _SPELLED))


def _parsed(text: str) -> Any:
    """The expression of a normalized text, None where it is no LaTeX formula as a whole, or not a number (``1/0``)."""
    try:
        # Of i the parser knows only sometimes what it is, and makes other symbols of all letters beside it.
        real = not should_treat_as_complex(_IMAGINARY.sub("", text))
        read = _converted(text, real)
        if isinstance(read, Basic):
            # Otherwise sympy would make 0 of a - a, and the symbol check could not see its letters.
            with evaluate(False):
                read = read.xreplace({symbol: I for symbol in symbols(read) if symbol.name == "i"})
        return None if read in (nan, zoo) or (isinstance(read, Basic) and read.has(nan, zoo)) else read
    except Exception:
        # The parser and sympy raise anything for what a model wrote.
        return None


def _converted(text: str, real: bool) -> Any:
    """What the parser makes of a text.

    It first predicts without context, which is several times as fast, and has the same result if it finds no error.
    """
    try:
        return _Converter(None, real, False, config=ConversionConfig(), mode=PredictionMode.SLL).parse(text)
    except Exception:
        return _Converter(None, real, False, config=ConversionConfig()).parse(text)


class _Converter(_Latex2Sympy):
    r"""The parser, but only a numeral before a fraction of numerals is a mixed number: ``(4)(5)`` is 20 here, not 9.

    `latex2sympy` has no option for it.
    """

    def __init__(self, *args: Any, mode: PredictionMode | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mode = mode

    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        if self.mode is not None:
            parser._interp.predictionMode = self.mode
        return parser

    def parse_number(self, text: str) -> Any:
        # Faster than sympy's own parser, which compiles Python code for each number.
        digits = text.replace(",", "")
        return Integer(digits) if digits.isdecimal() and digits.isascii() else super().parse_number(text)

    def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
        mixed = _MIXED.fullmatch("".join(part.getText() for part in arr[i:]))
        if mixed is not None and int(mixed[1]) >= int(mixed[2]):
            raise ValueError("no mixed number")
        left = None if mixed or i + 1 == len(arr) else self.convert_postfix(arr[i])
        if not isinstance(left, (Expr, MatrixBase)):
            return super().convert_postfix_list(arr, i)
        right = self.convert_postfix_list(arr, i + 1)
        is_matrix = any(getattr(side, "is_Matrix", False) for side in (left, right))
        return self.mat_mul_flat(left, right) if is_matrix else self.mul_flat(left, right)


def symbols(expression: Any) -> set[Any]:
    """The free symbols of what was parsed."""
    return set(getattr(expression, "free_symbols", ()))


@lru_cache(maxsize=256)
def quantity(text: str) -> tuple[str, Any]:
    r"""An answer without its unit, and the unit, None where it has none.

    A unit is a product of those of units.json, positive symbols and numbers, or what is counted: a symbol that is not
    positive. ``\$5`` keeps its sign, which the parser passes over.
    """
    match = _QUANTITY.fullmatch(text)
    unit = None if match is None else _unit(match["unit"] or match["words"], in_font=match["unit"] is not None)
    sign = _SIGN.search(text)
    signed = None if sign is None else _named(sign[1] or sign[2] or sign[3])
    return (text if match is None or unit is None else match["body"], unit if signed is None else signed)


def conversion(gold: Any, answer: Any) -> Any:
    """How many of the gold's unit one of the answer's unit is; None where it is another quantity.

    1 where one of them has none, where the answer's is not made of known units, and where the gold's is any length. But
    beside degrees what has no unit is radians, and beside a percentage it is its number.
    """
    if gold is None or answer is None:
        factor = {_DEGREE: 180 / pi, _PERCENT: _HUNDREDTH}.get(answer if gold is None else gold, Integer(1))
        return factor if answer is None else 1 / factor.doit()
    if not all(symbol.is_positive for symbol in symbols(answer)):
        return Integer(1)
    ratio = answer / gold
    if ratio.is_number:
        return ratio
    return Integer(1) if ratio.subs(_UNITS["unit"], _UNITS["m"]).is_number else None


def _unit(text: str, in_font: bool) -> Any:
    """The unit that a text says, None where it says none."""
    if re.search(r"\\(?:pi|infty|sqrt|theta)(?![a-zA-Z])", text):
        return None
    text = re.sub(r"\\[td]?frac\s*\{(.*?\})\s*\}\s*\{(.*)\}", r"\1/\2", text.replace("%", " percent "))
    text = _COMMAND.sub(lambda m: f" {_SIGNS_BY_COMMAND.get(m[0][1:], '')} ", text)
    text = re.sub(r"([\^µ])\s+(?=[-\w])", r"\1", re.sub(r"[{}$~.]|^[\s{]*(?:of\s+)?(?:an?\s)?", " ", text))
    words = _UNIT_WORDS.findall(text)
    if re.search(r"\d", _UNIT_WORDS.sub("", text)) or not words:
        return None
    if not in_font and re.fullmatch("[a-zA-Z](?<![msgh])", "".join(words)):
        # A variable.
        return None
    named = (_named(word) is not None or word in _PER or word.lower() in _POWERS for word in words[:3])
    start = next((i for i, is_named in enumerate(named) if is_named), None)
    if start is not None and not any(re.fullmatch(rf"{_any_of('no adjectives')}|.", word) for word in words[:start]):
        unit, rest = _product(words[start:])
        if len(rest) < len(words) - start and _REST.fullmatch(" ".join(rest)):
            return unit
    counted = _COUNTED.fullmatch(" ".join(words))
    if counted is None or not _REST.fullmatch(counted["rest"] or ""):
        return None
    return Symbol((counted["noun"] or counted["measure"]).lower().removesuffix("s"))


def _product(words: list[str]) -> tuple[Any, list[str]]:
    """The product of units that words begin with, and the words behind it. Of money per time it is the money."""
    unit = last = Integer(1)
    sign = power = 1
    used = 0
    for i, word in enumerate(words):
        if word in _PER and not symbols(unit) & _MONEY:
            sign = -1
        elif word.lower() in _POWERS:
            power = _POWERS[word.lower()]
        elif last != 1 and (word in _RAISED or word[0] == "^"):
            unit *= last ** ((_RAISED[word] if word in _RAISED else int(word[1:])) - 1)
            used = i + 1
        elif (named := _named(word)) is not None and (word != "in" or i + 1 == len(words) or words[i + 1][0] in "/^"):
            last = named**sign
            unit *= last**power
            power = 1
            used = i + 1
        else:
            break
    return unit, words[used:]


def _named(word: str) -> Any:
    """The unit of this name, None if there is none."""
    for form in dict.fromkeys((word, word.lower() if len(word) > 1 else word)):
        for ending in ("", "s", "es", "n", "en"):
            stem = form.removesuffix(ending)
            if form.endswith(ending) and stem in _UNITS and (len(stem) > 3 or "n" not in ending):
                return _UNITS[stem]
    return None


def _read_units() -> dict[str, Any]:
    """The units of units.json by their names, with their decimal multiples."""
    for line in _VOCABULARY["units"]:
        names, _, definition = line.partition(" = ")
        number, *of = definition.split()
        unit = Rational(number) * _product(of)[0] if number[0].isdigit() else Symbol(number, positive=True)
        for name in names.lstrip("* ").split():
            _UNITS[name] = unit
            if names.startswith("*"):
                powers = _VOCABULARY["prefixes"].items()
                _UNITS.update({prefix + name: Integer(10) ** power * unit for prefix, power in powers})
    _UNITS.update(dict.fromkeys(("degree", "deg", "度"), pi / 180 * _UNITS["rad"]))
    # Any length, or any area with its square.
    _UNITS["unit"] = Symbol("unit")
    return _UNITS


_UNITS: dict[str, Any] = {}
_read_units()
_DEGREE = _UNITS["degree"]
_PERCENT = _UNITS["percent"]
_MONEY = {_UNITS[name] for name in ("dollar", "euro", "rupee", "yuan")}
_CHINESE = sorted((name for name in (*_UNITS, *_POWERS, *_PER) if re.search(r"[\u4e00-\u9fff]", name)), key=len)
_UNIT_WORDS = re.compile(
    rf"(?i:quadrat|kubik)|{'|'.join(reversed(_CHINESE))}|{_MEASURE}|[\u4e00-\u9fff]+|[^\W\d_\u4e00-\u9fff]+|\^-?\d|[/¢]"
)
