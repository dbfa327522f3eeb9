r"""Where the answer to a problem of mathematics is, in rollouts that need not have a ``\boxed{}``."""

from __future__ import annotations

import re
from typing import Literal

from basis_rl.rewards.extract import last_boxed, take_answer
from basis_rl.rewards.math.notation import bare

MathAnswerIn = Literal["box", "tag", "hashes", "last_line", "last_number", "anywhere", "auto"]

# What a reader is told of each.
PLACES: dict[MathAnswerIn, str] = {
    "box": r"reads the answer from the last \boxed{}",
    "tag": "reads the answer from the last <answer>...</answer>",
    "hashes": "reads the answer behind the last ####",
    "last_line": "reads the answer from the last line",
    "last_number": "takes the last number for the answer",
    "anywhere": "reads the answer from a box, a tag or behind ####, and without these from where Math-Verify finds it",
}
_MARKED: tuple[MathAnswerIn, ...] = ("tag", "hashes")
_OPENS_BOX = re.compile(r"(?<!\\)\\(?:boxed|fbox)")


def find_answer(text: str, where: MathAnswerIn) -> str | None:
    r"""The answer of a rollout; None where there is none.

    A place as `take_answer` has them. A box in a tag, behind ``####`` or in the last line is the answer, and "The
    answer is", signs of a formula and a full stop around one are left out.
    """
    assert where in ("box", "tag", "hashes", "last_line", "last_number"), where
    found = take_answer(text, where)
    if found is None or where == "box":
        return found
    boxed = last_boxed(found)
    return bare(found) if boxed is None else boxed


def marked_answer(text: str) -> tuple[bool, str | None]:
    r"""Whether a rollout marks its answer, by a box, ``<answer>`` or ``####``; and the answer, None without one.

    A box that is never closed marks none: what Math-Verify would make of it does not count.
    """
    if _OPENS_BOX.search(text):
        return True, last_boxed(text)
    for where in _MARKED:
        found = find_answer(text, where)
        if found is not None:
            return True, found
    return False, None
