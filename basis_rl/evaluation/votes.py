"""Which answers are the same one, for the majority vote."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from basis_rl.rewards.extract import plain_number

_DROPPED = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|\$|(?<!\d)\s+|\s+(?!\d)|\.$")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
_MOST_FORMS = 16


def vote_form(answer: str) -> str:
    r"""An answer without what does not change it: white space, ``\left``, ``$``, ``\text{}``; numerals by value."""
    value = plain_number(answer)
    if value is not None:
        return str(value)
    text = _WORDS.sub(r"\1", re.sub(r"\\[dt]frac", r"\\frac", answer))
    return _DROPPED.sub("", text)


def count_votes(
    answers: Sequence[Sequence[str | None]], equivalent: Callable[[list[tuple[str, str]]], list[bool]]
) -> Tensor:
    """Numbers of the answers, equal ones of a problem by the same number, -1 for none. ``(P, n)`` int64.

    Two answers are the same if their `vote_form` is, or if `equivalent` says so of the two forms; right answers and
    wrong ones are grouped by this one rule. Of a problem's forms the 16 most frequent are compared with each other (two
    numerals of different form differ), the others stand alone.

    Args:
        answers: ``P`` problems with n answers each, None where there is none.
        equivalent: whether the two of each pair are the same answer.
    """
    forms = [[None if a is None or not a.strip() else vote_form(a) for a in row] for row in answers]
    written = {f: a for row, raw in zip(forms, answers, strict=True) for f, a in zip(row, raw, strict=True) if f and a}
    frequent = [[form for form, _ in Counter(filter(None, row)).most_common(_MOST_FORMS)] for row in forms]
    pairs = [
        (p, a, b)
        for p, row in enumerate(frequent)
        for a, b in combinations(row, 2)
        if not _both_numerals(written[a], written[b])
    ]
    # Each pair once, whatever number of problems has it: a comparison may take a while.
    asked = sorted({(a, b) for _, a, b in pairs})
    verdicts = equivalent([(written[a], written[b]) for a, b in asked]) if asked else []
    same = dict(zip(asked, verdicts, strict=True))
    stands_for: list[dict[str, str]] = [{} for _ in forms]
    # `a` is at least as frequent as `b`, and comes first.
    for p, a, b in pairs:
        if same[a, b]:
            stands_for[p].setdefault(b, stands_for[p].get(a, a))
    numbers = torch.full((len(forms), len(forms[0]) if forms else 0), -1, dtype=torch.int64)
    for p, row in enumerate(forms):
        known: dict[str, int] = {}
        for i, form in enumerate(row):
            if form is not None:
                numbers[p, i] = known.setdefault(stands_for[p].get(form, form), len(known))
    return numbers


def _both_numerals(a: str, b: str) -> bool:
    return plain_number(a) is not None and plain_number(b) is not None
