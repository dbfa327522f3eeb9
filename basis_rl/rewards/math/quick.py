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
_LETTER = re.compile(
    r"\(?([a-df-hj-zA-DF-HJ-Z])\)?|\\(?:text|textbf|mathrm|mathbf)\{\(?([a-df-hj-zA-DF-HJ-Z])\)?\}", re.ASCII
)
_AROUND_TIME = re.compile(rf"{SPACE}|\\(?:text|mbox|mathrm)|[{{}}.]")
_TIME = re.compile(r"(\d\d?)(?::|\\colon)(\d\d)(?:(?::|\\colon)(\d\d))?([ap]m)?", re.IGNORECASE | re.ASCII)
_RATIO = re.compile(r"\d{1,20}(?:(?::|\\colon)\d{1,20})+", re.ASCII)
_COLON = re.compile(r":|\\colon(?![a-z])")
_LONGEST = 80
_MOST_BLANKS = 1_000


def same_text(gold: str, answer: str) -> bool:
    """The two are the same text, white space being one blank however long; there is something in it to be right."""
    if gold != answer and (abs(len(gold) - len(answer)) > _MOST_BLANKS or gold.split() != answer.split()):
        return False
    return any(character.isalnum() for character in gold)


def quick_verdict(gold: str, answer: str, any_case: bool = True) -> bool | None:
    """Whether the answer is right, None where only Math-Verify can say.

    Args:
        gold: content of the gold's box.
        answer: content of the answer's box.
        any_case: a capital is the same letter, as to Math-Verify.
    """
    if len(gold) > _LONGEST or len(answer) > _LONGEST:
        return None
    expected = plain_number(gold)
    found = plain_number(answer)
    if expected is not None and found is not None:
        return _same_value(expected, found, exact="." not in gold and "." not in answer)
    letter = _letter(gold)
    other = _letter(answer)
    if letter is None and other is None:
        return None
    if letter is not None and other is not None:
        return (letter.lower() == other.lower()) if any_case else letter == other
    return False if expected is not None or found is not None else None


def same_time(gold: str, answer: str) -> bool | None:
    """Whether the answer is the gold's time of day, None where the gold is none. AM or PM may be missing on one side.

    ``8:34``, which is no ratio in lowest terms, ``05:00`` and ``3:15 p.m.`` are times; ``3:20`` may be a ratio.
    """
    expected = _time(gold)
    found = _time(answer)
    if expected is None:
        return None
    *clock, half = expected
    hour, minute, second = (int(part or 0) for part in clock)
    if not half and minute >= 10 and math.gcd(hour, minute) == 1 and not (clock[2] or "").startswith("0"):
        return None
    if found is None or [int(part or 0) for part in found[:3]] != [hour, minute, second]:
        return False
    return half == found[3] or not (half and found[3])


def same_ratio(gold: str, answer: str) -> bool | None:
    """Whether the answer is the gold's ratio, where one of them has three parts or more; None where none has.

    To the parser ``1:2:3`` is a quotient, 1/6. Of other parts than whole numbers, only their number is compared here.
    """
    expected = _ratio(gold)
    found = _ratio(answer)
    if max(len(expected), len(found)) < 3:
        colons = [len(_COLON.findall(text)) for text in (gold, answer)]
        return False if max(colons) > 1 and colons[0] != colons[1] else None
    pairs = list(zip(expected, found, strict=False))
    return len(expected) == len(found) and all(a * pairs[0][1] == b * pairs[0][0] for a, b in pairs)


def _ratio(text: str) -> list[int]:
    bare = _AROUND_TIME.sub("", text) if len(text) <= _LONGEST else ""
    return list(map(int, re.split(r":|\\colon", bare))) if _RATIO.fullmatch(bare) else []


def _time(text: str) -> tuple[str, str, str | None, str] | None:
    match = _TIME.fullmatch(_AROUND_TIME.sub("", text)) if len(text) <= _LONGEST else None
    if match is None or int(match[1]) > 24 or int(match[2]) > 59 or int(match[3] or 0) > 59:
        return None
    return match[1], match[2], match[3], (match[4] or "").lower()


def _same_value(a: Fraction, b: Fraction, exact: bool) -> bool | None:
    if a == b:
        return True
    near = abs(a - b) <= max(_NEAR, _NEAR_RELATIVE * max(abs(a), abs(b)))
    return None if near and not exact else False


def _letter(text: str) -> str | None:
    match = _LETTER.fullmatch(text.strip())
    if match is None:
        return None
    return match[1] or match[2]
