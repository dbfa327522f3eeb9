r"""What a text says to Math-Verify's parser, latex2sympy2_extended; loaded by the grading processes only.

All fixes of the parser are in this file. They concern products of numerals (which it reads as mixed numbers), the
imaginary unit, names that it reads as constants or functions, derivatives, words, and units.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode  # type: ignore[import-untyped]
from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy, normalize_latex  # type: ignore[import-untyped]
from math_verify.grader import should_treat_as_complex
from sympy import Basic, E, Expr, I, Integer, MatrixBase, Mul, Symbol, evaluate, nan, zoo  # type: ignore[import-untyped]

# Math-Verify's own settings for what is in a box, in two steps: what is a unit is seen after the first.
_UNITS_KEPT = NormalizationConfig(units=False, boxed="none")
_UNITS_CUT = NormalizationConfig(units=True, boxed="none")
_SPELLED = NormalizationConfig(basic_latex=False, malformed_operators=True, nits=True, boxed="none")
# All but the power of a unit.
_OTHER_DIGITS = re.compile(r"(?<!\^)(?<!\^\{)(?<!\^-)(?<!\^\{-)\d|\d\d")
# To sympy dv/dt is 0, since v does not depend on t; E, e, I and i are constants, which have no index and are given no
# value; \gamma is the gamma function: all become symbols.
_DERIVATIVE = re.compile(r"\\[dt]?frac\s*\{\s*d\s*\\?([a-zA-Z]+)\s*\}\s*\{\s*d\s*\\?([a-zA-Z]+)\s*\}")
_INDEXED = re.compile(r"(?<![a-zA-Z\\])([EeIi])\s*_\s*\{?\s*(\w+)\s*\}?")
_NAMED = re.compile(
    r"(^|[,;]|\\text\{[^{}]*\})([\s$]*\|?\s*)([EeIi])(?=\s*(?:\||\([^()=]*\)|\[[^\[\]=]*\])?\s*(?:=|\\in(?![a-z])|\\approx))"
)
# Math-Verify cuts off all from the first text on, so that a text that is a name hides the unit.
_TEXT_NAME = re.compile(r"^\s*\\(?:text|mbox)\s*\{[^{}]*\}(?=\s*=.*\\(?:text|mbox))")
_GAMMA = re.compile(r"\\gamma(?!\s*_|[a-zA-Z])")
SIGNS = re.compile(r"^\s*(?:\\approx(?:eq)?(?![a-zA-Z])|≈)|[€£¥]")
MODULUS = re.compile(r"\s*\\pmod\{(\w+)\}$")
# What a unit consists of; beside a text in it nothing else stands.
_OF_UNIT = re.compile(r"\\(?:text|mbox)\s*\{(?:[^{}]|\{[^{}]*\})*\}|\\[a-zA-Z]+|\^\s*\{?\s*-?\d\s*\}?")
_SHORT_UNITS = {
    "am", "cl", "cm", "dl", "dm", "ev", "ft", "gb", "gm", "gw", "hr", "hz", "in", "kb", "kg", "kj", "km", "kw", "lb",
    "mb", "mg", "mi", "ml", "mm", "ms", "mw", "nd", "nm", "ns", "oz", "pa", "pm", "pt", "qt", "rd",
    "sq", "st", "th", "yd", "yr",
}  # fmt: skip
# Of the commands in a unit: no other one, since what it is applied to would be left out with the unit.
_UNIT_COMMANDS = {
    "text", "mbox", "mathrm", "textnormal", "circ", "degree", "cdot", "frac", "dfrac", "tfrac", "left", "right", "mu",
    "Omega", "quad", "displaystyle", "per",
}  # fmt: skip
_QUANTITY = re.compile(r"\d|\\(?:pi|infty)(?![a-zA-Z])")
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
_MIXED = re.compile(r"\d+\\[dt]?frac\{?(\d+)\}?\{?(\d+)\}?")
COMMAND = re.compile(r"\\[a-zA-Z]+")
LETTERS = re.compile(r"[a-zA-Z]+")
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
    whole = _without_units(text, _UNITS_KEPT)
    stripped = _without_units(text, _UNITS_CUT)
    kept = _parsed(_spelled(whole))
    short = kept if stripped == whole else _parsed(_spelled(stripped))
    tail = whole[len(_common(whole, stripped)) :].strip()
    is_unit = bool(tail) and _is_unit(tail, letters=letters_are_units and not symbols(short))
    is_unit = is_unit and (not letters_are_units or _QUANTITY.search(stripped) is not None)
    found = [short, kept] if short is not None and is_unit else [kept]
    return tuple(reading for reading in found if reading is not None)


def formula(text: str) -> Any:
    """The expression of the content of a box, with its unit; see `_parsed`."""
    return _parsed(_spelled(_without_units(text, _UNITS_KEPT)))


def _without_units(text: str, units: NormalizationConfig) -> str:
    text = MODULUS.sub("", SIGNS.sub("", text))
    text = _INDEXED.sub(r"H_{\1\2}", _NAMED.sub(r"\1\2H_{\3}", text))
    text = _GAMMA.sub("H_{g}", _TEXT_NAME.sub("H_{t}", _DERIVATIVE.sub(r"D_{\1\2}", text)))
    return str(normalize_latex(text, units))


def _spelled(text: str) -> str:
    return str(normalize_latex(text, _SPELLED))


def _is_unit(tail: str, letters: bool) -> bool:
    """Whether a tail that Math-Verify cuts off is a unit: a text or a word; a letter if `letters` says so.

    The last letter of ``2x^2 + 3y^2 = d`` is none to it.
    """
    if _OTHER_DIGITS.search(tail) or ("{" in tail and re.search(r"[a-zA-Z,;=<>+-]", _OF_UNIT.sub("", tail))):
        return False
    if "{" in tail and not {command[1:] for command in COMMAND.findall(tail)} <= _UNIT_COMMANDS:
        return False
    word = "".join(LETTERS.findall(COMMAND.sub(" ", tail)))
    return (letters and len(word) < 2) or len(word) > 2 or word.lower() in _SHORT_UNITS or "\\" in tail


def _common(one: str, other: str) -> str:
    end = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:end]


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
