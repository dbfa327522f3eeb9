"""Math-Verify as it is, without the rules of this package; runs in the worker process."""

from __future__ import annotations

from math_verify import parse, verify


def plain_verdict(gold: str, text: str) -> bool | None:
    """Math-Verify's verdict on a rollout, with its own time limits; None if it finds nothing in the gold.

    Args:
        gold: content of the gold's box.
        text: of the rollout.
    """
    expected = parse(rf"\boxed{{{gold}}}")
    return verify(expected, parse(text)) if expected else None


def plain_answer(text: str) -> str | None:
    """The answer that Math-Verify finds in a rollout, as it writes it; None if it finds none."""
    found = parse(text, parsing_timeout=None)
    return next((value for value in reversed(found) if isinstance(value, str)), None)
