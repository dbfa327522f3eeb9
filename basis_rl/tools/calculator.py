"""Arithmetic without `eval`: Python's grammar, exact fractions, and no number grows beyond a bound."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

# Numerals as Python has them, also `007`, but neither exponents nor anything that is no arithmetic.
_SYMBOLS = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)|\*\*|//|[-+*/%()]|\s+")
_REWRITTEN = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
_MOST_CHARACTERS = 1000
_MOST_BITS = 1000


def calculator(expression: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, e.g. "12 * (3 + 4) / 7".

    Returns:
        The exact value of a whole number, else 12 significant digits.
    """
    value = evaluate(expression)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def evaluate(expression: str) -> Fraction:
    """The exact value. ``^`` is also a power. At most 1000 characters, and about 200 parentheses in one another.

    Raises:
        ValueError: no such expression, a division by zero, or a number of more than 1000 bits above or below.
    """
    if not isinstance(expression, str):
        raise ValueError(f"The expression must be text, got {type(expression).__name__}.")
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"The expression has {len(expression)} characters; at most {_MOST_CHARACTERS} are allowed.")
    text = expression.translate(_REWRITTEN)
    numbers: list[Fraction] = []

    def name(symbol: re.Match[str]) -> str:
        # Each numeral becomes a name, so that its digits stay exact.
        if symbol["number"] is None:
            return symbol.group() if symbol.group().strip() else " "
        numbers.append(Fraction(symbol["number"]))
        return f" n{len(numbers) - 1} "

    unknown = _SYMBOLS.sub("", text)
    if unknown:
        raise ValueError(f"Cannot read {unknown[:20]!r}.")
    try:
        return _value(ast.parse(_SYMBOLS.sub(name, text).strip(), mode="eval").body, numbers)
    except SyntaxError as error:
        raise ValueError(f"The expression cannot be read: {error.msg}.") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("The expression is nested too deeply.") from error
    except ZeroDivisionError as error:
        raise ValueError("Division by zero.") from error


def _value(node: ast.expr, numbers: list[Fraction]) -> Fraction:
    if isinstance(node, ast.Name):
        return _bounded(numbers[int(node.id[1:])])
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.operand, numbers))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        a = _value(node.left, numbers)
        b = _value(node.right, numbers)
        return _bounded(Fraction(_OPERATORS[type(node.op)](a, b)))
    raise ValueError("An operator is missing, or out of place.")


def _power(a: Fraction, b: Fraction) -> Fraction | float:
    if b.denominator != 1 and a < 0:
        raise ValueError("A fractional power of a negative number.")
    if b.denominator != 1:
        try:
            return float(a) ** float(b)
        except OverflowError as error:
            raise ValueError("The number is too large.") from error
    # B can have any size; only its parity and its sign count.
    if abs(a) in (0, 1):
        return a ** (int(b % 2) + 2 * (b > 0) - 2 * (b < 0))
    if abs(b) * max(a.numerator.bit_length(), a.denominator.bit_length()) > 2 * _MOST_BITS:
        raise ValueError("The number is too large.")
    return a ** int(b)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise ValueError("The number is too large.")
    return value


_SIGNS: dict[type, Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
