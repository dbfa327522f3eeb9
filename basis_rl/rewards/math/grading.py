r"""One answer against one gold by Math-Verify; runs in the worker process, where it may hang and die.

A gold and an answer are contents of boxes. What Math-Verify finds equal is right, unless it rests on a quirk
(`basis_rl.rewards.math.rules.QUIRKS`) that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.grader import is_assignment_relation, is_equation, is_relation
from sympy import Basic, FiniteSet, Float, Interval, Mul, Rational, Set, Symbol, Tuple  # type: ignore[import-untyped]

_LATEX = LatexExtractionConfig()
_UNITS_KEPT = [
    LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True)),
    ExprExtractionConfig(),
]
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|percentage|pct)\s*\}|\b(?:percent|percentage|pct)\b)")
_DEGREES = re.compile(r"\\circ|\\degree|°|degree")
_CURRENCY = re.compile(r"\\\$|[$€£]")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(?:\\text\{)?\s*(\w+)")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LETTERS = re.compile(r"[a-zA-Z]+")


def grade(gold: str, answer: str, refuse: Sequence[str] = ()) -> bool | None:
    """Whether the answer is right; None when the gold cannot be parsed.

    Args:
        gold: content of the gold's box.
        answer: content of the answer's box.
        refuse: quirks, on which a verdict must not rest.
    """
    expected = _parsed(gold)
    if not expected:
        return None
    if not _equal(expected, _parsed(answer)):
        return False
    return gold.split() == answer.split() or not any(_RELIES_ON[name](gold, answer) for name in refuse)


# Rollouts of one problem come together: its gold is parsed once.
@lru_cache(maxsize=256)
def _parsed(text: str) -> list[Any]:
    # Timeouts off: math_verify's own use SIGALRM handlers, which a computation inside C code outlives. The pool kills.
    parsed: list[Any] = parse(rf"\boxed{{{text}}}", parsing_timeout=None)
    return parsed


def _equal(expected: list[Any], found: list[Any]) -> bool:
    return bool(verify(expected, found, timeout_seconds=None))


def _expression(text: str) -> Any:
    """What the text was parsed to, None if it was not."""
    return next((value for value in _parsed(text) if not isinstance(value, str)), None)


def _one_sided(pattern: re.Pattern[str]) -> Callable[[str, str], bool]:
    return lambda gold, answer: bool(pattern.search(gold)) != bool(pattern.search(answer))


_percent_differs = _one_sided(_PERCENT)


def _without_percent_equal(gold: str, answer: str) -> bool:
    return _equal(_parsed(_PERCENT.sub("", gold)), _parsed(_PERCENT.sub("", answer)))


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
    left, right = _equations(_expression(gold)), _equations(_expression(answer))
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
    if (_kind(gold), _kind(answer)) != ("list", "list") or r"\pm" in gold + answer:  # plus and minus have no order
        return False
    left, right = _elements(gold), _elements(answer)
    return len(left) == len(right) and not all(_equal([a], [b]) for a, b in zip(left, right, strict=True))


def _duplicates(gold: str, answer: str) -> bool:
    left, right = _elements(gold), _elements(answer)
    return bool(left and right) and len(left) != len(right)


def _brackets(gold: str, answer: str) -> bool:
    if not all(isinstance(_expression(text), Tuple) for text in (gold, answer)):
        return False
    return ("[" in gold) != ("[" in answer)


def _set_for_relation(gold: str, answer: str) -> bool:
    left, right = _expression(gold), _expression(answer)
    if left is None or right is None or is_equation(left) or is_equation(right):
        return False
    return bool(is_relation(left)) != bool(is_relation(right)) and isinstance(
        left if is_relation(right) else right, Set
    )


def _units(gold: str, answer: str) -> bool:
    kept = [parse(rf"\boxed{{{text}}}", extraction_config=_UNITS_KEPT, parsing_timeout=None) for text in (gold, answer)]
    return not _equal(kept[0], kept[1])


def _case(gold: str, answer: str) -> bool:
    left, right = (sorted(_LETTERS.findall(_COMMAND.sub(" ", text))) for text in (gold, answer))
    return left != right and sorted(w.lower() for w in left) == sorted(w.lower() for w in right)


def _text(gold: str, answer: str) -> bool:
    def is_word(value: Any) -> bool:
        return isinstance(value, Symbol) and len(value.name) > 1 and value.name.isalpha()

    left, right = _expression(gold), _expression(answer)
    return (is_word(left) and isinstance(right, Mul)) or (is_word(right) and isinstance(left, Mul))


def _rounding(gold: str, answer: str) -> bool:
    left, right = _expression(gold), _expression(answer)
    if not isinstance(left, Basic) or not isinstance(right, Basic) or not (left.atoms(Float) | right.atoms(Float)):
        return False
    return not _equal([_exact(left)], [_exact(right)])


def _exact(expression: Any) -> Any:
    return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})


def _base(gold: str, answer: str) -> bool:
    return _BASE.findall(gold) != _BASE.findall(answer)


def _prose(gold: str, answer: str) -> bool:
    """The answer's expression was not read as LaTeX, but is the first number in the text."""
    read = parse(rf"\boxed{{{answer}}}", extraction_config=[_LATEX], fallback_mode="no_fallback", parsing_timeout=None)
    return not read and _expression(answer) is not None


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
    "prose": _prose,
}
