r"""Verdicts that need no Math-Verify: the same text, two numerals, single letters, times of day, ratios.

Each is proved equal to Math-Verify's by tests/rewards/math/test_quick.py, but for the differences that docs/rewards.md
lists.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from basis_rl.rewards.extract import plain_number
from basis_rl.rewards.math.notation import SPACE

# Math-Verify rounds to six decimals where one side has a decimal point. It decides what is nearer than these, and what
# a float of 15 digits may not tell apart.
_NEAR = Fraction(2, 10**6)
_NEAR_RELATIVE = Fraction(1, 10**9)
# Not i and I, the imaginary unit, nor e and E, Euler's number.
_LETTER = re.compile(r"\s*(?:\\(?:text|math)[a-z]*\{)?\(?([a-df-hj-zA-DF-HJ-Z])\)?\}?\s*", re.ASCII)
_AROUND_PARTS = re.compile(rf"{SPACE}|\\(?:text|mbox|mathrm)|[{{}}]|(?<=[apmAPM])\.")
_PARTS = re.compile(r"(\d{1,20}(?:(?::|\\colon)\d{1,20})+)([ap]m)?", re.IGNORECASE | re.ASCII)
COLON = re.compile(r":|\\colon(?![a-z])")
_LONGEST = 80
_MOST_BLANKS = 1_000


def same_text(gold: str, answer: str) -> bool:
    """The two are the same text, white space being one blank however long; there is something in it to be right."""
    if gold != answer and (abs(len(gold) - len(answer)) > _MOST_BLANKS or gold.split() != answer.split()):
        return False
    return any(character.isalnum() for character in gold)


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Whether the answer is right, None where only Math-Verify can say.

    Args:
        gold: content of the gold's box.
        answer: content of the answer's box.
    """
    if len(gold) > _LONGEST or len(answer) > _LONGEST:
        return None
    expected = plain_number(gold)
    found = plain_number(answer)
    if expected is not None and found is not None:
        return _same_value(expected, found, exact="." not in gold and "." not in answer)
    letter = _LETTER.fullmatch(gold)
    other = _LETTER.fullmatch(answer)
    if letter is not None and other is not None:
        # A capital is the same letter, as to Math-Verify.
        return letter[1].lower() == other[1].lower()
    # A letter is no number.
    is_one = letter is not None or other is not None
    return False if is_one and (expected is not None or found is not None) else None


def is_time(gold: str) -> bool:
    """Whether a gold is a time of day: ``8:34``, no ratio in lowest terms, ``05:00``, ``3:15 p.m.``; not ``3:20``."""
    parts, half = _parts(gold)
    if len(parts) not in (2, 3) or int(parts[0]) > 24 or any(len(part) != 2 or int(part) > 59 for part in parts[1:]):
        return False
    return bool(half) or parts[-1][0] == "0" or math.gcd(int(parts[0]), int(parts[1])) > 1


def same_parts(gold: str, answer: str) -> bool | None:
    """Whether the answer is the gold's time of day, or its ratio of three integers or more; None where both have none.

    AM or PM may be missing on one side, and 7:30 p.m. is 19:30. To the parser ``1:2:3`` is a quotient, 1/6.
    """
    (expected, half), (found, other) = _parts(gold), _parts(answer)
    pairs = list(zip(map(int, expected), map(int, found), strict=False))
    if is_time(gold):
        # Without its seconds it is the full minute.
        rest = {int(part) for part in expected[len(found) :] + found[len(expected) :]}
        if len(pairs) < 2 or not rest <= {0} or any(a != b for a, b in pairs[1:]):
            return False
        hours = {_of_24(pairs[0][0], half), _of_24(pairs[0][1], other)}
        return len(hours) == 1 or (pairs[0][0] == pairs[0][1] and not (half and other))
    colons = [len(COLON.findall(text)) for text in (gold, answer)]
    if max(colons) < 2 or (colons[0] == colons[1] and not pairs):
        return None
    totals = [sum(side) for side in zip(*pairs, strict=True)]
    return colons[0] == colons[1] and 0 not in totals and all(a * totals[1] == b * totals[0] for a, b in pairs)


def _of_24(hour: int, half: str) -> int:
    return hour % 12 + 12 * (half == "pm") if half else hour


def _parts(text: str) -> tuple[list[str], str]:
    """The whole numbers between colons, and AM or PM behind them."""
    match = _PARTS.fullmatch(_AROUND_PARTS.sub("", text)) if len(text) <= _LONGEST else None
    return (re.findall(r"\d+", match[1]), (match[2] or "").lower()) if match else ([], "")


def _same_value(a: Fraction, b: Fraction, exact: bool) -> bool | None:
    if a == b:
        return True
    near = abs(a - b) <= max(_NEAR, _NEAR_RELATIVE * max(abs(a), abs(b)))
    return None if near and not exact else False
