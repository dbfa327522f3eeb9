r"""Answers that no worker is bothered with: so large or so deep that only a timeout could be the answer.

Every measure of an answer is compared with its limit *and* with the gold's: what is beyond twice the gold's and beyond
the limit is wrong without being graded. An answer like the gold is therefore never screened, whatever its size.
"""

from __future__ import annotations

import math
import re

# Far above what golds and right answers have (tests/rewards/math/test_screen.py shows by how much), and where
# Math-Verify's time, exponential in the depth, reaches minutes.
LIMITS = {
    # Characters.
    "length": 2_000,
    # Open brackets.
    "depth": 24,
    # In a row.
    "digits": 1_000,
    # Decimal digits of a power, a factorial or a binomial coefficient of plain numbers.
    "size": 1_000_000,
    # Control characters that are no white space, such as NUL: no formula has them.
    "control": 0,
}

_BRACKETS = re.compile(r"\\.|[(\[{]|[)\]}]", re.DOTALL)
_DIGITS = re.compile(r"\d+")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
_EXPONENT = r"[{(]\s*(\d{1,30})\s*[})]"
_POWER = re.compile(rf"(?<![\d.])(\d{{1,30}})\s*(?:(?:\^|\*\*)\s*{_EXPONENT}|\^\s*(\d)|\*\*\s*(\d{{1,30}}))")
_FACTORIAL = re.compile(r"(\d{1,30})((?:[\s)}\]]*!)+)")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{\s*(\d{1,30})\s*\}\s*\{\s*(\d{1,30})\s*\}")
_MOST_POWERS = 50


def screened(gold: str, answer: str) -> str | None:
    """The first measure (a key of `LIMITS`) by which `answer` is beyond its limit and beyond twice the gold's, or None.

    Linear in the length of `answer`; of one that is too long nothing else is measured.
    """
    for name, limit in LIMITS.items():
        found = measure(name, answer)
        if found > limit and found > 2 * measure(name, gold):
            return name
    return None


def measure(name: str, text: str) -> float:
    """One of the measures of `LIMITS`."""
    if name == "length":
        return len(text)
    if name == "depth":
        return _depth(text)
    if name == "digits":
        return max(map(len, _DIGITS.findall(text)), default=0)
    if name == "control":
        return len(_CONTROL.findall(text))
    return max(_powers(text), _factorials(text), _binomials(text))


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        symbol = match.group()
        if symbol in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif symbol in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _powers(text: str) -> float:
    """Digits of the largest ``a^b`` of literals; each is put as a number, a tower from its top down."""
    largest = 0.0
    for _ in range(_MOST_POWERS):
        match = _POWER.search(text)
        if match is None:
            break
        base = int(match[1])
        exponent = int(match[2] or match[3] or match[4])
        digits = exponent * math.log10(base) if base > 1 else 0.0
        largest = max(largest, digits)
        value = str(base**exponent) if digits < 20 else "9" * 20
        text = f"{text[: match.start()]} {value} {text[match.end() :]}"
    return largest


def _factorials(text: str) -> float:
    """Digits of the largest ``n!``; ``(n!)!`` and ``n!!`` are factorials of factorials, as to Math-Verify."""
    largest = 0.0
    for match in _FACTORIAL.finditer(text):
        value = int(match[1])
        for _ in range(match[2].count("!") - 1):
            value = math.factorial(value) if value <= 20 else 10**30
        largest = max(largest, math.lgamma(min(value, 10**30) + 1) / math.log(10))
    return largest


def _binomials(text: str) -> float:
    largest = 0.0
    for match in _BINOMIAL.finditer(text):
        n = int(match[1])
        k = int(match[2])
        if 0 < k < n:
            # C(n, k) <= (e n / k)^k, and lgamma of large numbers cancels.
            k = min(k, n - k)
            largest = max(largest, k * math.log10(math.e * n / k))
    return largest
