"""Arithmetic without `eval`: one pass over the characters, and no number grows beyond a bound."""

from __future__ import annotations

import re
from fractions import Fraction

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|(\*\*|//|[-+*/%^()]))")
_REWRITTEN = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
# Binding strength, and whether a ~ (op) b ~ c is taken from the right. "neg" is the sign: -2^2 is -4, 2^-1 is 0.5.
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "neg": 3, "**": 4}
_MOST_CHARACTERS = 1000
_MOST_BITS = 1000


def calculator(expression: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, e.g. "12 * (3 + 4) / 7".

    Returns:
        The exact value of a whole number, else 12 significant digits.
    """
    return _text(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value. ``^`` is a power too. Linear in the length, which is at most 1000 characters.

    Raises:
        ValueError: no such expression, a division by zero, or a number of more than 1000 bits above or below.
    """
    if not isinstance(expression, str):
        raise ValueError(f"The expression must be text, got {type(expression).__name__}.")
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"The expression has {len(expression)} characters; at most {_MOST_CHARACTERS} are allowed.")
    values: list[Fraction] = []
    waiting: list[str] = []
    operand = True  # what may come next: an operand (a number, a sign, an opening parenthesis), or an operator
    text, at = expression.translate(_REWRITTEN).rstrip(), 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"Cannot read {text[at:].strip()[:20]!r}.")
        at = token.end()
        number, symbol = token.groups()
        symbol = "**" if symbol == "^" else symbol
        if operand != (number is not None or symbol == "(" or (operand and symbol in ("-", "+"))):
            raise ValueError(f"'{number or symbol}' is out of place.")
        if number is not None:
            values.append(_bounded(Fraction(number)))
            operand = False
        elif symbol == "(":
            waiting.append(symbol)
        elif operand:
            if symbol == "-":
                waiting.append("neg")
        elif symbol == ")":
            _apply(values, waiting, 0)
            if not waiting:
                raise ValueError("A closing parenthesis without its opening one.")
            waiting.pop()
        else:
            _apply(values, waiting, _STRENGTH[symbol] + (symbol == "**"))
            waiting.append(symbol)
            operand = True
    if operand:
        raise ValueError("The expression ends too early." if text else "The expression is empty.")
    _apply(values, waiting, 0)
    if waiting:
        raise ValueError("A parenthesis is not closed.")
    return values[0]


def _apply(values: list[Fraction], waiting: list[str], least: int) -> None:
    """Apply the waiting operators from the end while they bind at least as strongly; an open parenthesis stops it."""
    while waiting and waiting[-1] != "(" and _STRENGTH[waiting[-1]] >= least:
        symbol = waiting.pop()
        b = values.pop()
        values.append(_bounded(-b if symbol == "neg" else _binary(symbol, values.pop(), b)))


def _binary(symbol: str, a: Fraction, b: Fraction) -> Fraction:
    if symbol == "+":
        return a + b
    if symbol == "-":
        return a - b
    if symbol == "*":
        return a * b
    if symbol == "**":
        return _power(a, b)
    if b == 0:
        raise ValueError("Division by zero.")
    return a / b if symbol == "/" else Fraction(a // b) if symbol == "//" else a % b


def _power(a: Fraction, b: Fraction) -> Fraction:
    if b.denominator != 1:
        return Fraction(_root(a, b))
    if a == 0 and b < 0:
        raise ValueError("Division by zero.")
    if abs(a) not in (0, 1) and abs(b) * max(a.numerator.bit_length(), a.denominator.bit_length()) > 2 * _MOST_BITS:
        raise ValueError("The number is too large.")
    return Fraction(a ** int(b)) if abs(a) not in (0, 1) else Fraction(1 if b == 0 or (b % 2 == 0 and a) else a)


def _root(a: Fraction, b: Fraction) -> float:
    if a < 0:
        raise ValueError("A fractional power of a negative number.")
    try:
        return float(a) ** float(b)
    except (OverflowError, ZeroDivisionError) as error:
        raise ValueError("The number is too large.") from error


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise ValueError("The number is too large.")
    return value


def _text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.12g}"
