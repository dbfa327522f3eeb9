r"""One answer against one gold by Math-Verify; runs in the worker process, where it may hang and die.

A gold and an answer are contents of boxes. What Math-Verify finds equal is right, unless it rests on a quirk
(`basis_rl.rewards.math.rules.QUIRKS`) that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from latex2sympy2_extended import is_expr_of_only_symbols  # type: ignore[import-untyped]
from latex2sympy2_extended.logic import And  # type: ignore[import-untyped]
from math_verify import parse, verify
from math_verify.grader import is_assignment_relation, is_equation, is_relation, take_last_relation
from mpmath import isfinite, mpc  # type: ignore[import-untyped]
from sympy import (  # type: ignore[import-untyped]
    Basic,
    Derivative,
    Eq,
    Expr,
    FiniteSet,
    Float,
    Interval,
    Limit,
    MatrixBase,
    MatrixExpr,
    Mul,
    Rational,
    Set,
    Symbol,
    Tuple,
    oo,
)
from sympy.concrete.expr_with_limits import ExprWithLimits  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

from basis_rl.rewards.math.latex import APPROXIMATELY, COMMAND, LETTERS, MODULUS, SIGNS, holds, normalized, parsed, readings, symbols

# How far the sides of an approximation sign may be apart, where no numeral says.
_COARSE = 0.005
# How far numbers that are equal when rounded to six decimals.
_FINE = 1e-3
# To so many digits a difference of numbers without a decimal point is evaluated, to see whether it is 0.
_DIGITS = 1_000
_NUMERAL = re.compile(r"[-+]?(?:\d+\.(\d*)|[1-9]\d*?(0*)$|0+$)")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|percentage|pct)\s*\}|\b(?:percent|percentage|pct)\b)")
_DEGREES = re.compile(r"\\circ|\\degree|°|degree")
_CURRENCY = re.compile(r"\\\$|[$€£]")
_MONEY = re.compile(r"\\\$|[€£¥₹]")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(?:\\text\{)?\s*(\w+)")
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
    for found in readings(answer):
        if _equal(expected, found) and (
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
    read = next(iter(readings(gold, letters_are_units=False)), None)
    if _says_nothing(read):
        return None
    return _value(read) if is_equation(read) and all(map(_is_number, _sides(read))) else read


def _equal(expected: Any, found: Any) -> bool:
    """What Math-Verify finds equal; an inequality may stand for an interval, a vector for a tuple."""
    if all(isinstance(side, Eq) and isinstance(side.rhs, Set) for side in (expected, found)):
        # x = \\pm 2, which Math-Verify compares as texts.
        if expected.lhs != found.lhs:
            return False
        expected, found = expected.rhs, found.rhs
    expected, found = _tuple_of(expected, found), _tuple_of(found, expected)
    if is_relation(expected) and is_relation(found) and not (is_equation(expected) or is_equation(found)):
        found = _set_of(found) if symbols(expected) == symbols(found) else found
    # Timeouts off: math_verify's own use SIGALRM handlers, which a computation inside C code outlives. The pool kills.
    return not _apart(expected, found) and bool(
        verify(expected, found, allow_set_relation_comp=True, timeout_seconds=None)
    )


def _tuple_of(value: Any, other: Any) -> Any:
    """A vector as a tuple, where the other value is one, or may be."""
    vector = _value(value)
    is_meant = isinstance(vector, MatrixBase) and 1 in vector.shape and isinstance(_value(other), (Tuple, Interval))
    return Tuple(*vector) if is_meant else value


def _set_of(relation: Any) -> Any:
    """All that fulfils an inequality in one unknown; the inequality itself where sympy does not say."""
    try:
        return relation.as_set()
    except Exception:
        return relation


def _apart(expected: Any, found: Any) -> bool:
    """Whether two expressions in the same symbols differ at one point by so much that no rule of equality holds.

    Math-Verify would compare numbers to six decimals, and then simplify the difference, which takes most of its time
    for wrong answers. Percentages, integrals, sums and limits are not evaluated here, but left to it.
    """
    for side in (expected, found):
        if not isinstance(side, Expr) or isinstance(side, MatrixExpr) or side.has(ExprWithLimits, Derivative, Limit):
            return False
    letters = sorted(symbols(expected), key=str)
    if set(letters) != symbols(found):
        return False
    point = {symbol: 1.3 + 0.37 * i for i, symbol in enumerate(letters)}
    a = _number(expected, point)
    b = _number(found, point)
    if a is None or b is None or not (isfinite(a) and isfinite(b)):
        return False
    return abs(a - b) > max(1e-4, 0.01 * max(abs(a), abs(b)))


def _expression(text: str) -> Any:
    """What the text was parsed to, None if it was not."""
    return next(iter(readings(text)), None)


def _unsound(expected: Any, found: Any, gold: str, answer: str) -> str | None:
    """Why an equal answer does not stand for the gold; None where it does.

    ``chain``: a side of a chain of equations is not what the chain ends with (``x = 7 = 8``). ``interval``: one of a
    single number, or of none, not an interval for SymPy, or the ends of an open one for it.
    ``infinity``: an interval or a set that holds infinity, where the gold's is open there, which is one and
    the same to sympy. ``currency``: another one than the gold's, or another modulus.
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
    for side, other in ((expected, found), (found, expected)):
        if is_relation(side) and not is_equation(side) and isinstance(_value(other), FiniteSet):
            return "interval"
    if "[" in answer.replace(r"\sqrt[", "") and not found.has(Interval, Tuple) and found.has(Set):
        return "interval"
    if _CLOSED_AT_INFINITY.search(answer) and not _CLOSED_AT_INFINITY.search(gold):
        return "infinity"
    if isinstance(found, FiniteSet) and found.has(oo, -oo) and not isinstance(expected, FiniteSet):
        return "infinity"
    if any(len({*label.findall(gold), *label.findall(answer)}) > 1 for label in (_MONEY, MODULUS)):
        return "currency"
    if not _approximates(answer):
        return "approximation"
    if not _symbols_known(expected, found):
        return "symbol"
    # Two equations with other left sides need not have the same right sides.
    if whole and isinstance(found, Eq) and getattr(expected, "lhs", None) != found.lhs:
        return None
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
    return not (symbols(side) <= symbols(last)) or (isinstance(side, Symbol) and side == last)


def _says_nothing(expression: Any) -> bool:
    """Whether it is an equation, or a chain of them, whose sides are all the same: ``0 = 0``."""
    if not is_equation(expression):
        return False
    first, *others = _sides(expression)
    return all(side == first for side in others)


def _sides(equation: Any) -> list[Any]:
    links = equation._unsorted_args if isinstance(equation, And) else (equation,)
    return [side for link in links for side in (link.lhs, link.rhs)]


def _number(expression: Any, point: Mapping[Any, float] | None = None) -> Any:
    """The value of an expression without symbols other than those of `point`, of any size; None where it has none."""
    try:
        value = expression.evalf(subs=point) if point else expression
        return mpc(*value.evalf().as_real_imag()) if _is_number(value) else None
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, NotImplementedError):
        return None


def _is_number(expression: Any) -> bool:
    if not isinstance(expression, Expr) or isinstance(expression, MatrixExpr):
        return False
    return not expression.free_symbols and not expression.has(AppliedUndef)


def _approximates(answer: str) -> bool:
    """Whether the sides of approximation signs are names, and numbers near one another."""
    texts = APPROXIMATELY.split(SIGNS.sub("", answer))
    if len(texts) > 1 and is_expr_of_only_symbols(parsed(normalized(texts[0]))):
        texts = texts[1:]
    if len(texts) == 1:
        return True
    sides = [parsed(normalized(text)) for text in texts]
    numbers = [_number(_value(side)) for side in sides]
    return all(map(holds, sides, texts)) and all(
        a is not None and b is not None and abs(a - b) <= _rounding_of(text, abs(a))
        for a, b, text in zip(numbers, numbers[1:], texts[1:], strict=False)
    )


def _rounding_of(text: str, size: float) -> float:
    """How far a number of this size may be from what is written behind an approximation sign: half its last digit."""
    match = _NUMERAL.match(normalized(text).strip())
    if match is None:
        return _COARSE * size
    if match[1] is not None:
        return 0.5001 * 10.0 ** -len(match[1])
    return 0.5001 * 10.0 ** len(match[2] or "")


def _symbols_known(expected: Any, found: Any) -> bool:
    if is_relation(expected) and is_relation(found):
        return symbols(found) <= symbols(expected)
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
    return {str(symbol) for symbol in symbols(expression)} | {str(function.func) for function in applied}


def _near(expected: Any, found: Any, percent: bool) -> bool:
    """Whether what is equal to six decimals, or to 15 digits, is so however small it is, or one of its terms.

    Of lists, intervals and vectors every element is compared with those of the other side.
    """
    sides = [_elements_of(side) for side in (expected, found)]
    return all(any(_is_near(a, b, percent) for a in sides[0]) for b in sides[1])


def _elements_of(value: Any) -> list[Any]:
    if isinstance(value, Interval):
        return [value.start, value.end]
    if isinstance(value, MatrixBase):
        return list(value)
    return [_value(part) for part in _parts(value)]


def _is_near(expected: Any, found: Any, percent: bool) -> bool:
    if _has_float(expected) or _has_float(found) or percent:
        a = _number(expected)
        b = _number(found)
        return a is None or b is None or any(abs(a * by - b) <= _FINE * max(abs(a * by), abs(b)) for by in ((1, 100, 0.01) if percent else (1,)))
    if expected == found or symbols(expected) != symbols(found) or not isinstance(expected, Expr):
        return True
    try:
        difference = (expected - found).doit()
        point = {symbol: Rational(13 + 4 * i, 10) for i, symbol in enumerate(sorted(symbols(difference), key=str))}
        return not difference.subs(point).evalf(3, maxn=_DIGITS, strict=True) != 0
    except Exception:
        # It cannot be told from 0, or is no number.
        return True


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
    left, right = (parsed(normalized(text)) for text in (gold, answer))
    return left is None or right is None or not _equal(left, right)


def _case(gold: str, answer: str) -> bool:
    left, right = (sorted(LETTERS.findall(COMMAND.sub(" ", text))) for text in (gold, answer))
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
