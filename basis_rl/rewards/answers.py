"""Where in a completion the answer is: one rule for all rewards that compare it, each in one pass over the text."""

from __future__ import annotations

from typing import Literal, get_args

from basis_rl.rewards.extract import last_boxed

AnswerIn = Literal["box", "tag", "hashes", "last_line", "whole"]


def take_answer(text: str, where: AnswerIn) -> str | None:
    r"""The answer of a completion, None where it gives none; the last one where it gives several.

    Args:
        text: the completion.
        where: ``box``: the last balanced ``\boxed{...}``; ``tag``: the last ``<answer>...</answer>``; ``hashes``: the
            rest of the line after the last ``####``; ``last_line``: the last line that is not empty; ``whole``: all of
            the text. The last two begin after ``</think>``, if there is one.
    """
    if where == "box":
        return last_boxed(text)
    if where == "tag":
        end = text.rfind("</answer>")
        start = text.rfind("<answer>", 0, max(end, 0))
        return text[start + len("<answer>") : end].strip() if start >= 0 else None
    if where == "hashes":
        _, mark, rest = text.rpartition("####")
        answer = rest.partition("\n")[0].strip() if mark else ""
        return answer or None
    visible = text.rpartition("</think>")[2].strip()
    return (visible.rpartition("\n")[2].strip() if where == "last_line" else visible) or None


def check_where(reward: str, where: str) -> None:
    """Refuse an unknown `AnswerIn`.

    Raises:
        ValueError: it is none.
    """
    if where not in get_args(AnswerIn):
        raise ValueError(f"{reward}: answer_in must be one of {', '.join(get_args(AnswerIn))}, got {where!r}.")
