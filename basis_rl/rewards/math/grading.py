r"""One answer against one gold by Math-Verify; runs in the worker process, where it may hang and die.

A gold and an answer are contents of boxes. What Math-Verify finds equal is right, unless it is so by accident
(`_unsound`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import sympy as sp  # type: ignore[import-untyped]
from latex2sympy2_extended import is_expr_of_only_symbols  # type: ignore[import-untyped]
from latex2sympy2_extended.logic import And  # type: ignore[import-untyped]
from math_verify import parse, verify
from math_verify.grader import is_equation, is_relation, take_last_relation
from mpmath import isfinite, mpc  # type: ignore[import-untyped]
from sympy.concrete.expr_with_limits import ExprWithLimits  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

from basis_rl.rewards.math.latex import MODULUS, SIGNS, conversion, formula, quantity, readings, symbols
from basis_rl.rewards.math.quick import COLON

# Relative difference that the sides of an approximation sign may have; the left one is graded.
_COARSE = 0.05
# Relative difference that numbers may have which are equal when rounded to six decimals.
_FINE = 1e-3
# Digits to which a difference of numbers without a decimal point is evaluated, to see whether it is 0. The gamma
# function, of which factorials and binomials are made, takes a twentieth of a second for 300, and seconds for 1,000.
_DIGITS = 300
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|percentage|pct)\s*\}|\b(?:percent|percentage|pct)\b)")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(?:\\text\{)?\s*(\w+)")
_APPROXIMATELY = re.compile(r"\\approx(?:eq)?(?![a-zA-Z])|\\simeq(?![a-zA-Z])|≈")
_CLOSED_AT_INFINITY = re.compile(r"\[(?:\\[,;]|[^,;\[\]])*\\infty|\\infty(?:\\[,;]|[^,;\[\]])*\]")


def grade(gold: str, answer: str, check: bool = False) -> str:
    """``right``, or why the answer is not.

    ``no_gold``: there is nothing in the gold; ``prose``: the gold is not a formula; ``unread``: the answer is not;
    ``unequal``: Math-Verify finds it unequal; ``unsound: REASON`` (`_unsound`): it finds it equal.

    Args:
        gold: content of the gold's box.
        answer: content of the answer's box.
        check: ask whether the gold can be read at all; its own text is not enough.
    """
    if not any(character.isalnum() for character in gold):
        return "no_gold"
    if not check and (same := _same_ratio(gold, answer)) is not None:
        return "right" if same else "unequal"
    expected = _gold_reading(gold)
    if expected is None:
        return "prose"
    verdict = "unread"
    for converted, found in _in_the_golds_unit(gold, answer):
        # An integral in a letter of its own may take Math-Verify for ever.
        is_integral = isinstance(found, sp.Basic) and found.has(ExprWithLimits)
        if (is_integral and not check and not _symbols_known(expected, found)) or not _equal(expected, found):
            verdict = "unequal" if verdict == "unread" else verdict
        elif not check and (reason := _unsound(expected, found, gold, answer, converted)):
            verdict = f"unsound: {reason}"
        else:
            return "right"
    return verdict


def _same_ratio(gold: str, answer: str) -> bool | None:
    """Whether two ratios of so many parts, three or more, are the same; None where they are none.

    To the parser ``a:b:c`` is a quotient, which ``a:c:b`` is equal to.
    """
    texts = [COLON.split(text) for text in (gold, answer)]
    if len(texts[0]) < 3 or len(texts[0]) != len(texts[1]):
        return None
    sides = [[_expression(text) for text in side] for side in texts]
    if not all(_is_formula(part) for side in sides for part in side):
        return None
    ratios = [[part / side[0] for part in side] for side in sides]
    return all(_equal(a, b) and _is_near(a, b, percent=False) for a, b in zip(*ratios, strict=True))


def _in_the_golds_unit(gold: str, answer: str) -> Iterator[tuple[bool, Any]]:
    """What the answer may say: converted to the gold's unit (True), and as it stands."""
    factor = conversion(quantity(gold)[1], quantity(answer)[1])
    value = _value(_expression(answer))
    if factor not in (None, 1) and _is_formula(value):
        value = value.doit()
        # 0.07 m are no 7 cm in binary floating point.
        for number in dict.fromkeys((sp.nsimplify(value, rational=True), value)):
            yield True, number * factor
    for found in readings(answer):
        yield False, found


def plain_verdict(gold: str, text: str) -> bool | None:
    """Math-Verify's own verdict on a rollout, with its own time limits; None if it finds nothing in the gold."""
    expected = parse(rf"\boxed{{{gold}}}")
    return verify(expected, parse(text)) if expected else None


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
    if all(isinstance(side, sp.Eq) and isinstance(side.rhs, sp.Set) for side in (expected, found)):
        # x = \\pm 2, which Math-Verify compares as texts.
        if expected.lhs != found.lhs:
            return False
        expected = expected.rhs
        found = found.rhs
    expected, found = _tuple_of(expected, found), _tuple_of(found, expected)
    if _apart(expected, found):
        return False
    # Timeouts off: math_verify's own use SIGALRM handlers, which a computation inside C code outlives. The pool kills.
    options: dict[str, Any] = {"allow_set_relation_comp": True, "timeout_seconds": None}
    if verify(expected, found, **options):
        return True
    # Inequalities in one letter that are written otherwise.
    compared = all(is_relation(side) and not is_equation(side) for side in (expected, found))
    if _equal_where_positive(expected, found):
        return True
    return compared and symbols(expected) == symbols(found) and bool(verify(expected, _set_of(found), **options))


_NOT_ALGEBRAIC = (AppliedUndef, ExprWithLimits, sp.Abs, sp.floor, sp.ceiling, sp.sign, sp.Piecewise)
_POINTS = (sp.Rational(1, 7), sp.Rational(7, 5), sp.Rational(23), sp.Rational(1009))


def _equal_where_positive(expected: Any, found: Any) -> bool:
    r"""Whether two formulas with roots of letters are equal where all are positive: ``\sqrt{ab}``, ``a\sqrt{b/a}``."""
    sides = (expected, found if is_relation(expected) else _value(found))
    known = sorted(symbols(expected), key=str)
    rooted = all(_is_formula(side) and any(_is_root(power) for power in side.atoms(sp.Pow)) for side in sides)
    if not rooted or symbols(sides[1]) != set(known) or any(side.has(*_NOT_ALGEBRAIC) for side in sides):
        return False
    points = [{symbol: start + sp.Rational(4 * i, 5) for i, symbol in enumerate(known)} for start in _POINTS]
    values = [[_number(side.xreplace(point).evalf(30)) for side in sides] for point in points]
    return all(a is not None and b is not None and abs(a - b) <= 1e-12 * abs(a) for a, b in values)


def _is_root(power: Any) -> bool:
    return bool(symbols(power.base)) and not power.exp.is_integer and bool(power.exp.is_number)


def _tuple_of(value: Any, other: Any) -> Any:
    """A vector as a tuple, where the other value is a tuple or an interval, which is written alike."""
    vector = _value(value)
    is_vector = isinstance(vector, sp.MatrixBase) and 1 in vector.shape
    return sp.Tuple(*vector) if is_vector and isinstance(_value(other), (sp.Tuple, sp.Interval)) else value


def _set_of(relation: Any) -> Any:
    """The solutions of an inequality in one unknown; the inequality itself where sympy cannot solve it."""
    try:
        return relation.as_set()
    except Exception:
        return relation


def _apart(expected: Any, found: Any) -> bool:
    """Whether two expressions differ at one point by so much that no rule of equality holds, or one is an interval.

    Math-Verify would compare numbers to six decimals, and then simplify the difference, which takes most of its time
    for wrong answers. Percentages, integrals, sums and limits are not evaluated here, but left to it.
    """
    sides = (expected, found)
    if any(isinstance(side, (sp.Interval, sp.Union)) for side in sides) and any(map(_is_formula, sides)):
        return True
    if not all(map(_is_formula, sides)) or any(side.has(ExprWithLimits, sp.Derivative, sp.Limit) for side in sides):
        return False
    known = symbols(expected)
    used = symbols(found)
    # Letters that are only on the other side may be the same in capitals, as Euler's number and E are.
    if (known - used and used - known) or {"e", "E"} & {symbol.name for symbol in known ^ used}:
        return False
    point = {symbol: 1.3 + 0.37 * i for i, symbol in enumerate(sorted(known | used, key=str))}
    a = _number(expected, point)
    b = _number(found, point)
    if a is None or b is None or not (isfinite(a) and isfinite(b)):
        return False
    return abs(a - b) > max(1e-4, 0.01 * max(abs(a), abs(b)))


def _expression(text: str) -> Any:
    """What the text was parsed to, None if it was not."""
    return next(iter(readings(text)), None)


def _unsound(expected: Any, found: Any, gold: str, answer: str, converted: bool) -> str | None:
    """Why an answer that is equal to Math-Verify does not stand for the gold; None where it does.

    - ``chain``: a side of a chain of equations is not what the chain ends with (``x = 7 = 8``);
    - ``interval``: one side is an interval, and the other a set of single numbers;
    - ``infinity``: the answer's interval or set holds infinity and the gold's does not, which is the same to sympy;
    - ``modulus``, ``unit``, ``base``: the answer has another one; a unit unless it is `converted` to the gold's;
    - ``approximation``: the sides of the sign are not near;
    - ``symbol``: a symbol that is not the gold's (``0 \\cdot a`` is 0 whatever a is), or 0 for ``x + y = 0``;
    - ``near``: equal when rounded to six decimals, but only since both are small.
    """
    whole = is_equation(expected)
    written = {side.strip() for side in answer.split("=")}
    # 120/2 = 60, which is read as 60 = 60.
    says = isinstance(found, sp.Basic) and not whole and len(written) > 1
    if not all(_consistent(part, whole, says) for part in _parts(found)):
        return "chain"
    for side, other in ((expected, found), (found, expected)):
        if is_relation(side) and not is_equation(side) and isinstance(_value(other), sp.FiniteSet):
            return "interval"
    if "[" in answer.replace(r"\sqrt[", "") and not found.has(sp.Interval, sp.Tuple) and found.has(sp.Set):
        return "interval"
    if _CLOSED_AT_INFINITY.search(answer) and not _CLOSED_AT_INFINITY.search(gold):
        return "infinity"
    if isinstance(found, sp.FiniteSet) and found.has(sp.oo, -sp.oo) and not isinstance(expected, sp.FiniteSet):
        return "infinity"
    if len({*MODULUS.findall(gold), *MODULUS.findall(answer)}) > 1:
        return "modulus"
    units = [quantity(text)[1] for text in (gold, answer)]
    if not converted and None not in units and conversion(*units) != 1:
        return "unit"
    bases = [_BASE.findall(text) for text in (gold, answer)]
    if [] not in bases and bases[0] != bases[1]:
        return "base"
    if not _approximates(answer):
        return "approximation"
    if not _symbols_known(expected, found):
        return "symbol"
    # Math-Verify takes a sum of letters for a name, whose value is the right side: the 0 says nothing of the equation.
    if (
        isinstance(expected, sp.Eq)
        and isinstance(expected.lhs, sp.Add)
        and expected.rhs == 0
        and not is_relation(found)
    ):
        return "symbol"
    # Two equations with other left sides need not have the same right sides.
    if whole and isinstance(found, sp.Eq) and getattr(expected, "lhs", None) != found.lhs:
        return None
    percent = bool(_PERCENT.search(gold)) != bool(_PERCENT.search(answer))
    return None if _near(_value(expected), _value(found), percent) else "near"


def _parts(expression: Any) -> list[Any]:
    """What is in a list, a set, a vector or an interval; else the expression itself."""
    if isinstance(expression, sp.Interval):
        return [expression.start, expression.end]
    if isinstance(expression, sp.MatrixBase):
        return list(expression)
    return list(expression.args) if isinstance(expression, (sp.FiniteSet, sp.Tuple)) else [expression]


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
    known = {name: last for name in sides if isinstance(name, sp.Symbol)}
    if not known or side in known or not (_is_formula(side) and _is_formula(last)) or side.has(AppliedUndef):
        return side
    return side.subs(known)


def _is_name(side: Any, last: Any) -> bool:
    """Whether a side says what the last side of a chain is the value of; so may an integral or a sum."""
    if isinstance(side, sp.Basic) and side.has(AppliedUndef, ExprWithLimits, sp.Limit):
        return True
    return not (symbols(side) <= symbols(last)) or (isinstance(side, sp.Symbol) and side == last)


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


def _is_formula(value: Any) -> bool:
    """Whether it is a number, or would be one with numbers for its letters."""
    return isinstance(value, sp.Expr) and not isinstance(value, sp.MatrixExpr)


def _is_number(value: Any) -> bool:
    return _is_formula(value) and not value.free_symbols and not value.has(AppliedUndef)


def _approximates(answer: str) -> bool:
    """Whether the sides of approximation signs are names, and numbers near one another."""
    texts = _APPROXIMATELY.split(SIGNS.sub("", answer))
    if len(texts) > 1 and is_expr_of_only_symbols(formula(texts[0])):
        texts = texts[1:]
    if len(texts) == 1:
        return True
    sides = [formula(text) for text in texts]
    numbers = [_number(_value(side)) for side in sides]
    near = (a is not None and b is not None and abs(a - b) <= _COARSE * abs(a) for a, b in pairwise(numbers))
    return all(near)


def _symbols_known(expected: Any, found: Any) -> bool:
    """Whether the answer has no symbol that the gold has not: ``0 \\cdot a`` is 0 whatever a is."""
    if is_relation(expected) and is_relation(found):
        return symbols(found) <= symbols(expected)
    sides = [[_value(part) for part in _parts(expression)] for expression in (expected, found)]
    if any(is_relation(part) for side in sides for part in side):
        return True
    known, used = ({name.lower() for part in side for name in _names(part)} for side in sides)
    # A word is one symbol in \\text{}, and as many as it has letters outside; E and e may be Euler's number.
    words = any(isinstance(side, sp.Symbol) and len(side.name) > 1 for side in (expected, found))
    return used <= known | {"e"} or words


def _names(expression: Any) -> set[str]:
    """The names of symbols and of unknown functions: ``0 f(7)`` is 0 whatever f is."""
    applied = expression.atoms(AppliedUndef) if isinstance(expression, sp.Basic) else ()
    return {str(symbol) for symbol in symbols(expression)} | {str(function.func) for function in applied}


def _near(expected: Any, found: Any, percent: bool) -> bool:
    """Whether what is equal to six decimals, or to 15 digits, is so however small it is, or one of its terms.

    Of lists, intervals and vectors every element is compared with those of the other side; of inequalities the bounds,
    where the same is bounded by them.
    """
    sides = [_bounds(side) or [_value(part) for part in _parts(side)] for side in (expected, found)]
    bounded = [{part for part in side if symbols(part)} for side in sides]
    if bounded[0] != bounded[1] and (_bounds(expected) or _bounds(found)):
        return True
    alike = ([(a, b) for a in sides[0] if symbols(a) == symbols(b)] for b in sides[1])
    return all(any(_is_near(*pair, percent) for pair in pairs) for pairs in alike if pairs)


def _bounds(value: Any) -> list[Any]:
    """The sides of an inequality; empty for anything else."""
    return _sides(value) if is_relation(value) and not is_equation(value) else []


def _is_near(expected: Any, found: Any, percent: bool) -> bool:
    if _has_float(expected) or _has_float(found) or percent:
        a = _number(expected)
        b = _number(found)
        if a is None or b is None:
            return True
        return any(abs(a * by - b) <= _FINE * max(abs(a * by), abs(b)) for by in ((1, 100, 0.01) if percent else (1,)))
    if expected == found or not isinstance(expected, sp.Expr):
        return True
    try:
        difference = (expected - found).doit()
        point = {symbol: sp.Rational(13 + 4 * i, 10) for i, symbol in enumerate(sorted(symbols(difference), key=str))}
        return bool(difference.subs(point).evalf(3, maxn=_DIGITS, strict=True) == 0)
    except Exception:
        # It cannot be told from 0, or is no number.
        return True


def _has_float(expression: Any) -> bool:
    return bool(expression.atoms(sp.Float))
