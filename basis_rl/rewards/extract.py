"""Finding the answer in a completion, in one pass over its characters."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Content of the last balanced ``\boxed{...}`` (or ``\fbox``), None if there is none.

    Last = the one that closes last, so the outer one of two nested boxes. A box that is never closed is passed over,
    ``\{`` and ``\}`` are not braces. Linear in the length of `text`, however many boxes are left open in it.
    """
    stack: list[int | None] = []  # for each open brace: where the content starts if it opens a box, else None
    last: tuple[int, int] | None = None
    for token in _TOKENS.finditer(text):
        symbol = token.group()
        if symbol == "{":
            stack.append(None)
        elif symbol == "}":
            start = stack.pop() if stack else None
            if start is not None:
                last = (start, token.start())
        elif symbol.endswith("{") and len(symbol) > 2:
            stack.append(token.end())
    return text[last[0] : last[1]].strip() if last else None


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text to grade: the completion itself, or the last assistant message of a conversation."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            return message.get("content") or ""
    return ""
