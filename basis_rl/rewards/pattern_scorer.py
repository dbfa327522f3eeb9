"""Matching a user's pattern, in a worker: it may take exponential time. Imports nothing of basis_rl."""

from __future__ import annotations

import re


def matches(text: str, pattern: str) -> float:
    """1.0 if the pattern matches all of the text (``.`` matches line ends too), else 0.0."""
    return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
