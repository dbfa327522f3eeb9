r"""One answer against one gold by Math-Verify; runs in the worker process, where it may hang and die.

A gold and an answer are contents of boxes. What Math-Verify finds equal is right, unless it rests on a quirk
(`basis_rl.rewards.math.rules.QUIRKS`) that is refused.
"""

from __future__ import annotations

import re
from cmath import isfinite
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig, is_expr_of_only_symbols  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy, normalize_latex  # type: ignore[import-untyped]
from latex2sympy2_extended.logic import And  # type: ignore[import-untyped]
from math_verify import parse, verify
from math_verify.grader import (
    is_assignment_relation,
    is_equation,
    is_relation,
    should_treat_as_complex,
    take_last_relation,
)
from sympy import (  # type: ignore[import-untyped]
    Basic,
    Derivative,
    Expr,
    FiniteSet,
    Float,
    I,
    Interval,
    Limit,
    MatrixExpr,
    Mul,
    Rational,
    Set,
    Symbol,
    Tuple,
    evaluate,
    nan,
    oo,
    srepr,
    zoo,
)
from sympy.concrete.expr_with_limits import ExprWithLimits  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

# Math-Verify's own settings for what is in a box, but for the units of the first.
_UNITS_KEPT = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
_UNITS_CUT = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="none")
# How far the sides of an approximation sign may be apart, where no numeral says.
_COARSE = 0.005
# How far numbers that are equal when rounded to six decimals.
_FINE = 1e-3
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
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
_MIXED = re.compile(r"\d+\\[dt]?frac\{?\d+\}?\{?\d+\}?")
# Of intervals: no tuple has it.
_BOUNDED = re.compile(r"\\infty|\\cup|[\[\]]")
_SIGNS = re.compile(r"^\s*(?:\\approx(?:eq)?(?![a-zA-Z])|≈)|[€£¥]")
_APPROXIMATELY = re.compile(r"\\approx(?:eq)?(?![a-zA-Z])|\\simeq(?![a-zA-Z])|≈")
_NUMERAL = re.compile(r"[-+]?(?:\d+\.(\d*)|[1-9]\d*?(0*)$|0+$)")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|percentage|pct)\s*\}|\b(?:percent|percentage|pct)\b)")
_DEGREES = re.compile(r"\\circ|\\degree|°|degree")
_CURRENCY = re.compile(r"\\\$|[$€£]")
_MONEY = re.compile(r"\\\$|[€£¥₹]")
_QUANTITY = re.compile(r"\d|\\(?:pi|infty)(?![a-zA-Z])")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(?:\\text\{)?\s*(\w+)")
_WORDS = re.compile(r"\\(?:begin|end|[a-zA-Z]*text[a-zA-Z]*|math[a-z]+|mbox|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LETTERS = re.compile(r"[a-zA-Z]+")
_NUMERALS = re.compile(r"(?<![\d.])\d+(?![\d.])")
# Reduced fractions; indices.
_VALUES = re.compile(r"\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|\d+\s*/\s*\d+|_\s*\{?\d+\}?")
_CLOSED_AT_INFINITY = re.compile(r"\[(?:\\[,;]|[^,;\[\]])*\\infty|\\infty(?:\\[,;]|[^,;\[\]])*\]")


def grade(gold: str, answer: str, refuse: Sequence[str] = (), check: bool = False) -> bool | None:
    """Whether the answer is right; None when there is nothing in the gold.

    Args:
        gold: content of the gold's box.
        answer: content of the answer's box.
        refuse: quirks, on which a verdict must not rest.
        check: ask whether the gold can be read at all; its own text is not enough.
    """
    if not any(character.isalnum() for character in gold):
        return None
    expected = _gold_reading(gold)
    if expected is None:
        return False
    for found in _readings(answer):
        if _equal(expected, found, _BOUNDED.search(gold) is not None) and (
            check or _unsound(expected, found, gold, answer) is None
        ):
            return gold.split() == answer.split() or not any(_RELIES_ON[name](gold, answer) for name in refuse)
    return False


def misread(gold: str) -> bool:
    """Whether Math-Verify's own reading of a gold lacks what the gold says, so that it is read otherwise here."""
    read = parse(rf"\boxed{{{gold}}}", parsing_timeout=None)
    first = next((value for value in read if not isinstance(value, str)), None)
    return first is not None and first != _gold_reading(gold)


def _gold_reading(gold: str) -> Any:
    """What the gold says, None if it is not a formula. Its letters are part of it: ``6m`` is not 6.

    A capital is the same letter to the parser. So it reads ``N = n`` as ``n = n``, which every equation that has no
    solution, ``n = n - 3``, is equal to: such a gold is its text only. One between numbers, ``0.56 = 56 \\%``, is true
    as every other is: it is its number.
    """
    read = next(iter(_readings(gold, letters_are_units=False)), None)
    if _says_nothing(read):
        return None
    return _value(read) if is_equation(read) and all(map(_is_number, _sides(read))) else read


def _holds(reading: Any, text: str) -> bool:
    """Whether the letters of a text, but for those of texts and commands, are in what was read, and its numerals.

    Numerals are only asked for where there are letters: of numbers the value is read.
    """
    # Of x \\approx 2 the number is meant.
    if _APPROXIMATELY.search(text):
        return True
    if _symbols(reading):
        said = _NUMERALS.findall(_VALUES.sub(" ", _WORDS.sub(" ", text)))
        if not {numeral.lstrip("0") or "0" for numeral in said} <= set(re.findall(r"\d+", srepr(reading))):
            return False
    letters = {letter for word in _LETTERS.findall(_WORDS.sub(" ", text)) if len(word) < 3 for letter in word.lower()}
    held = f"{reading} {_symbols(reading)}".lower()
    return all(letter in held for letter in letters - {"e", "i"})


# Rollouts of one problem come together: its gold is parsed once.
@lru_cache(maxsize=256)
def _readings(text: str, letters_are_units: bool = True) -> tuple[Any, ...]:
    """What a text may say, the likelier first: without its unit, and with all that stands in it.

    It is read as LaTeX or not at all. Math-Verify's other ways (the last number in the text, the last side of a chain
    that it cannot read) leave out the rest of it.
    """
    text = text.strip()
    whole = _normalized(text, units=True)
    stripped = _normalized(text)
    kept = _latex(whole)
    short = kept if stripped == whole else _latex(stripped)
    tail = whole[len(_common(whole, stripped)) :].strip()
    is_unit = bool(tail) and _is_unit(tail, letters=letters_are_units and not _symbols(short))
    is_unit = is_unit and (not letters_are_units or _QUANTITY.search(stripped) is not None)
    readings = [short, kept] if short is not None and is_unit else [kept]
    readings = [reading for reading in readings if reading is not None]
    if not letters_are_units:
        readings = [reading for reading in readings if _holds(reading, stripped if reading is short else whole)]
    return tuple(readings)


def _normalized(text: str, units: bool = False) -> str:
    """As Math-Verify normalizes the content of a box, the units cut off or kept."""
    text = _INDEXED.sub(r"H_{\1\2}", _NAMED.sub(r"\1\2H_{\3}", _SIGNS.sub("", text)))
    text = _GAMMA.sub("H_{g}", _TEXT_NAME.sub("H_{t}", _DERIVATIVE.sub(r"D_{\1\2}", text)))
    return str(normalize_latex(text, _UNITS_KEPT if units else _UNITS_CUT))


def _is_unit(tail: str, letters: bool) -> bool:
    """Whether a tail that Math-Verify cuts off is a unit: a text or a word; a letter if `letters` says so.

    The last letter of ``2x^2 + 3y^2 = d`` is none to it.
    """
    if _OTHER_DIGITS.search(tail) or ("{" in tail and re.search(r"[a-zA-Z,;=<>+-]", _OF_UNIT.sub("", tail))):
        return False
    if "{" in tail and not {command[1:] for command in _COMMAND.findall(tail)} <= _UNIT_COMMANDS:
        return False
    word = "".join(_LETTERS.findall(_COMMAND.sub(" ", tail)))
    return (letters and len(word) < 2) or len(word) > 2 or word.lower() in _SHORT_UNITS or "\\" in tail


def _common(one: str, other: str) -> str:
    end = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:end]


def _latex(text: str) -> Any:
    """The expression of a normalized text, None where it is no LaTeX formula as a whole, or not a number (``1/0``)."""
    try:
        # Of i the parser knows only sometimes what it is, and makes other symbols of all letters beside it.
        real = not should_treat_as_complex(_IMAGINARY.sub("", text))
        read = _Converter(None, real, False, config=ConversionConfig()).parse(text)
        if isinstance(read, Basic):
            # So that the letters of a - a stay.
            with evaluate(False):
                read = read.xreplace({symbol: I for symbol in _symbols(read) if symbol.name == "i"})
        lost = read in (nan, zoo) or (isinstance(read, Basic) and read.has(nan, zoo)) or _lost_derivative(read)
        return None if lost else read
    except Exception:
        # Whatever the parser and sympy raise for what a model wrote.
        return None


class _Converter(_Latex2Sympy):
    r"""The parser, but only a numeral before a fraction of numerals is a mixed number: ``(4)(5)`` is 20 here, not 9.

    What was converted is kept, so that no part is converted twice.
    """

    def convert_postfix(self, postfix: Any) -> Any:
        known = self.__dict__.setdefault("_converted", {})
        if postfix not in known:
            known[postfix] = super().convert_postfix(postfix)
        return known[postfix]

    def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
        known = self.__dict__.setdefault("_listed", {})
        if arr[i] not in known:
            known[arr[i]] = self._product(arr, i)
        return known[arr[i]]

    def _product(self, arr: Any, i: int) -> Any:
        left = self.convert_postfix(arr[i])
        if i + 1 < len(arr) and getattr(left, "is_Integer", False):
            right = self.convert_postfix_list(arr, i + 1)
            rational = getattr(right, "is_Rational", False)
            if rational and not _MIXED.fullmatch("".join(part.getText() for part in arr[i:])):
                return self.mul_flat(left, right)
        return super().convert_postfix_list(arr, i)


def _lost_derivative(read: Any) -> bool:
    r"""Whether one of ``\frac{dv}{dt}`` is in it: 0 to sympy, for which v does not depend on t."""
    derivatives = read.atoms(Derivative) if isinstance(read, Basic) else ()
    return any(not derivative.expr.has(*derivative.variables) for derivative in derivatives)


def _equal(expected: Any, found: Any, bounded: bool = False) -> bool:
    """`bounded`: an inequality may stand for the interval that is expected."""
    # Timeouts off: math_verify's own use SIGALRM handlers, which a computation inside C code outlives. The pool kills.
    return not _apart(expected, found) and bool(
        verify(expected, found, allow_set_relation_comp=bounded, timeout_seconds=None)
    )


def _apart(expected: Any, found: Any) -> bool:
    """Whether two expressions in the same symbols differ at one point by so much that no rule of equality holds.

    Math-Verify would compare numbers to six decimals, and then simplify the difference, which takes most of its time
    for wrong answers. Percentages, integrals, sums and limits are not evaluated here, but left to it.
    """
    for side in (expected, found):
        if not isinstance(side, Expr) or isinstance(side, MatrixExpr) or side.has(ExprWithLimits, Derivative, Limit):
            return False
    symbols = sorted(_symbols(expected), key=str)
    if set(symbols) != _symbols(found):
        return False
    point = {symbol: 1.3 + 0.37 * i for i, symbol in enumerate(symbols)}
    a = _number(expected, point)
    b = _number(found, point)
    if a is None or b is None or not (isfinite(a) and isfinite(b)):
        return False
    return abs(a - b) > max(1e-4, 0.01 * max(abs(a), abs(b)))


def _expression(text: str) -> Any:
    """What the text was parsed to, None if it was not."""
    return next(iter(_readings(text)), None)


def _unsound(expected: Any, found: Any, gold: str, answer: str) -> str | None:
    """Why an equal answer does not stand for the gold; None where it does.

    ``chain``: a side of a chain of equations is not what the chain ends with (``x = 7 = 8``). ``interval``: one of a
    single number, or of none, not an interval for SymPy, or the ends of an open one for it.
    ``infinity``: an interval or a set that holds infinity, where the gold's is open there, which is one and
    the same to sympy. ``currency``: another one than the gold's.
    ``approximation``: the sides of the sign are not near.
    ``symbol``: one that is not the gold's (``0 \\cdot a`` is 0 whatever a is). ``near``: equal when rounded to six
    decimals, but only since both are small.
    """
    whole = is_equation(expected)
    written = {side.strip() for side in answer.split("=")}
    # 120/2 = 60, which is read as 60 = 60.
    says = isinstance(found, Basic) and not whole and len(written) > 1
    if not all(_consistent(part, whole, says) for part in _parts(found)):
        return "chain"
    if is_relation(expected) and not whole and isinstance(_value(found), FiniteSet):
        return "interval"
    if "[" in answer.replace(r"\sqrt[", "") and not found.has(Interval, Tuple) and found.has(Set):
        return "interval"
    if _CLOSED_AT_INFINITY.search(answer) and not _CLOSED_AT_INFINITY.search(gold):
        return "infinity"
    if isinstance(found, FiniteSet) and found.has(oo, -oo) and not isinstance(expected, FiniteSet):
        return "infinity"
    if len({*_MONEY.findall(gold), *_MONEY.findall(answer)}) > 1:
        return "currency"
    if not _approximates(answer):
        return "approximation"
    if not _symbols_known(expected, found):
        return "symbol"
    return None if _near(_value(expected), _value(found), _percent_differs(gold, answer)) else "near"


def _parts(expression: Any) -> list[Any]:
    return list(expression.args) if isinstance(expression, (FiniteSet, Tuple)) else [expression]


def _value(expression: Any) -> Any:
    return take_last_relation(expression).rhs if is_equation(expression) else expression


def _consistent(relation: Any, equation: bool = False, says: bool = False) -> bool:
    """Whether the sides of a chain of equations are what its last side is, but for names, and it says something.

    A side that has no letters but those of the last is none of a name: ``7 = 8``, ``2x = x^2``, ``(3,4) = (1,2)``.
    Where the gold is an equation (`equation`), and the relation is no chain, the two are compared as a whole. `says`:
    its sides are written differently.
    """
    if not is_equation(relation):
        return True
    *sides, last = _sides(relation)
    if equation and len(sides) == 1:
        return not _says_nothing(relation)
    sides = [_with_values(side, sides, last) for side in sides]
    return (says or not _says_nothing(relation)) and all(
        _equal(last, side) for side in sides if not _is_name(side, last)
    )


def _with_values(side: Any, sides: Sequence[Any], last: Any) -> Any:
    """A side of a chain with the value of every letter that is itself a side of it: ``7x = x = 5`` says ``35 = 5``."""
    if not isinstance(side, Expr) or isinstance(side, (Symbol, MatrixExpr)) or side.has(AppliedUndef):
        return side
    known = {name: last for name in sides if isinstance(name, Symbol) and isinstance(last, Expr)}
    return side if isinstance(last, MatrixExpr) else side.subs(known)


def _is_name(side: Any, last: Any) -> bool:
    """Whether a side says what the last side of a chain is the value of; so may an integral or a sum."""
    if isinstance(side, Basic) and side.has(AppliedUndef, ExprWithLimits, Limit):
        return True
    return not (_symbols(side) <= _symbols(last)) or (isinstance(side, Symbol) and side == last)


def _says_nothing(expression: Any) -> bool:
    """Whether it is an equation, or a chain of them, whose sides are all the same: ``0 = 0``."""
    if not is_equation(expression):
        return False
    first, *others = _sides(expression)
    return all(side == first for side in others)


def _sides(equation: Any) -> list[Any]:
    links = equation._unsorted_args if isinstance(equation, And) else (equation,)
    return [side for link in links for side in (link.lhs, link.rhs)]


def _is_number(expression: Any) -> bool:
    if not isinstance(expression, Expr) or isinstance(expression, MatrixExpr):
        return False
    return not expression.free_symbols and not expression.has(AppliedUndef)


def _approximates(answer: str) -> bool:
    """Whether the sides of approximation signs are names, and numbers near one another."""
    texts = _APPROXIMATELY.split(_SIGNS.sub("", answer))
    if len(texts) > 1 and is_expr_of_only_symbols(_latex(_normalized(texts[0]))):
        texts = texts[1:]
    if len(texts) == 1:
        return True
    sides = [_latex(_normalized(text)) for text in texts]
    numbers = [_number(_value(side)) for side in sides]
    return all(map(_holds, sides, texts)) and all(
        a is not None and b is not None and abs(a - b) <= _rounding_of(text, abs(a))
        for a, b, text in zip(numbers, numbers[1:], texts[1:], strict=False)
    )


def _rounding_of(text: str, size: float) -> float:
    """How far a number of this size may be from what is written behind an approximation sign: half its last digit."""
    match = _NUMERAL.match(_normalized(text).strip())
    if match is None:
        return _COARSE * size
    if match[1] is not None:
        return 0.5001 * 10.0 ** -len(match[1])
    return 0.5001 * 10.0 ** len(match[2] or "")


def _number(expression: Any, point: Mapping[Any, float] | None = None) -> complex | None:
    """The value of an expression without symbols other than those of `point`; None where it has none."""
    try:
        value = expression.evalf(subs=point) if point else expression
        return complex(value.evalf()) if _is_number(value) else None
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, NotImplementedError):
        return None


def _symbols_known(expected: Any, found: Any) -> bool:
    if is_relation(expected) and is_relation(found):
        return _symbols(found) <= _symbols(expected)
    sides = [[_value(part) for part in _parts(expression)] for expression in (expected, found)]
    if any(is_relation(part) for side in sides for part in side):
        return True
    known, used = ({name.lower() for part in side for name in _names(part)} for side in sides)
    # A word is one symbol in \\text{}, and as many as it has letters outside; E and e may be Euler's number.
    words = any(isinstance(side, Symbol) and len(side.name) > 1 for side in (expected, found))
    return used <= known | {"e"} or words


def _names(expression: Any) -> set[str]:
    """Of symbols and of unknown functions: ``0 f(7)`` is 0 whatever f is."""
    applied = expression.atoms(AppliedUndef) if isinstance(expression, Basic) else ()
    return {str(symbol) for symbol in _symbols(expression)} | {str(function.func) for function in applied}


def _symbols(expression: Any) -> set[Any]:
    return set(getattr(expression, "free_symbols", ()))


def _near(expected: Any, found: Any, percent: bool) -> bool:
    a = _number(expected)
    b = _number(found)
    if a is None or b is None or not (_has_float(expected) or _has_float(found) or abs(a) < 1e-6 or abs(b) < 1e-6):
        return True
    return any(abs(a * by - b) <= _FINE * max(abs(a * by), abs(b)) for by in ((1, 100, 0.01) if percent else (1,)))


def _has_float(expression: Any) -> bool:
    return bool(expression.atoms(Float))


def _one_sided(pattern: re.Pattern[str]) -> Callable[[str, str], bool]:
    return lambda gold, answer: bool(pattern.search(gold)) != bool(pattern.search(answer))


_percent_differs = _one_sided(_PERCENT)


def _without_percent_equal(gold: str, answer: str) -> bool:
    return _equal(_expression(_PERCENT.sub("", gold)), _expression(_PERCENT.sub("", answer)))


def _percent_as_number(gold: str, answer: str) -> bool:
    return _percent_differs(gold, answer) and _without_percent_equal(gold, answer)


def _percent_as_fraction(gold: str, answer: str) -> bool:
    return _percent_differs(gold, answer) and not _without_percent_equal(gold, answer)


def _equations(expression: Any) -> list[Any]:
    """The equations that an expression, a set or a tuple consists of."""
    parts = expression.args if isinstance(expression, (FiniteSet, Tuple)) else (expression,)
    return [part for part in parts if is_equation(part)]


def _unwrapped(gold: str, answer: str) -> list[Any]:
    """The equations of the one side, where the other has none."""
    left = _equations(_expression(gold))
    right = _equations(_expression(answer))
    return [] if left and right else left + right


def _names_something(equation: Any) -> bool:
    left = equation.lhs if hasattr(equation, "lhs") else None
    applied = left is not None and getattr(getattr(left, "func", None), "is_Function", False)
    return is_assignment_relation(equation) or applied


def _assignment(gold: str, answer: str) -> bool:
    return any(_names_something(equation) for equation in _unwrapped(gold, answer))


def _equation(gold: str, answer: str) -> bool:
    return any(not _names_something(equation) for equation in _unwrapped(gold, answer))


def _braced(text: str) -> bool:
    return r"\{" in text or r"\lbrace" in text


def _kind(text: str) -> str:
    expression = _expression(text)
    equation = expression if is_equation(expression) else None
    if equation is not None and hasattr(equation, "rhs"):
        expression = equation.rhs
    if isinstance(expression, FiniteSet):
        return "set" if _braced(text) else "list"
    return "tuple" if isinstance(expression, (Tuple, Interval)) else "other"


def _kinds(one: str, other: str) -> Callable[[str, str], bool]:
    return lambda gold, answer: {_kind(gold), _kind(answer)} == {one, other}


def _singleton_set(gold: str, answer: str) -> bool:
    kinds = {_kind(gold), _kind(answer)}
    return "other" in kinds and bool(kinds & {"set", "list"}) and not _set_for_relation(gold, answer)


def _elements(text: str) -> list[Any]:
    expression = _expression(text)
    return list(getattr(expression, "_unsorted_args", expression.args)) if isinstance(expression, FiniteSet) else []


def _list_order(gold: str, answer: str) -> bool:
    # Plus and minus have no order.
    if (_kind(gold), _kind(answer)) != ("list", "list") or r"\pm" in gold + answer:
        return False
    left = _elements(gold)
    right = _elements(answer)
    return len(left) == len(right) and not all(_equal(a, b) for a, b in zip(left, right, strict=True))


def _duplicates(gold: str, answer: str) -> bool:
    left = _elements(gold)
    right = _elements(answer)
    return bool(left and right) and len(left) != len(right)


def _brackets(gold: str, answer: str) -> bool:
    if not all(isinstance(_expression(text), Tuple) for text in (gold, answer)):
        return False
    return ("[" in gold) != ("[" in answer)


def _set_for_relation(gold: str, answer: str) -> bool:
    left = _expression(gold)
    right = _expression(answer)
    if left is None or right is None or is_equation(left) or is_equation(right):
        return False
    return bool(is_relation(left)) != bool(is_relation(right)) and isinstance(
        left if is_relation(right) else right, Set
    )


def _units(gold: str, answer: str) -> bool:
    left, right = (_latex(_normalized(text, units=True)) for text in (gold, answer))
    return left is None or right is None or not _equal(left, right)


def _case(gold: str, answer: str) -> bool:
    left, right = (sorted(_LETTERS.findall(_COMMAND.sub(" ", text))) for text in (gold, answer))
    return left != right and sorted(w.lower() for w in left) == sorted(w.lower() for w in right)


def _text(gold: str, answer: str) -> bool:
    def is_word(value: Any) -> bool:
        return isinstance(value, Symbol) and len(value.name) > 1 and value.name.isalpha()

    left = _expression(gold)
    right = _expression(answer)
    return (is_word(left) and isinstance(right, Mul)) or (is_word(right) and isinstance(left, Mul))


def _rounding(gold: str, answer: str) -> bool:
    left = _expression(gold)
    right = _expression(answer)
    if not isinstance(left, Basic) or not isinstance(right, Basic) or not (left.atoms(Float) | right.atoms(Float)):
        return False
    return not _equal(_exact(left), _exact(right))


def _exact(expression: Any) -> Any:
    return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})


def _base(gold: str, answer: str) -> bool:
    return _BASE.findall(gold) != _BASE.findall(answer)


_RELIES_ON: dict[str, Callable[[str, str], bool]] = {
    "percent_as_fraction": _percent_as_fraction,
    "percent_as_number": _percent_as_number,
    "assignment": _assignment,
    "equation": _equation,
    "set_for_tuple": _kinds("set", "tuple"),
    "list_for_tuple": _kinds("list", "tuple"),
    "singleton_set": _singleton_set,
    "list_order": _list_order,
    "duplicates": _duplicates,
    "brackets": _brackets,
    "set_for_relation": _set_for_relation,
    "units": _units,
    "currency": _one_sided(_CURRENCY),
    "degrees": _one_sided(_DEGREES),
    "case": _case,
    "text": _text,
    "rounding": _rounding,
    "base": _base,
    "approximation": _one_sided(re.compile(r"\\approx|≈")),
    "ratio": _one_sided(re.compile(":")),
}
