"""Finding the answer in a rollout, in one pass over its characters."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Literal

AnswerIn = Literal["box", "tag", "hashes", "last_line", "last_number", "whole"]

# A numeral without braces, \boxed 5, unless it is part of a formula that goes on: \boxed 5/6, \boxed 2^{10}, \boxed 5x.
_NUMERAL = (
    r"[-+]?(?>\d{1,3}(?:(?:,|\\,|\{,\})\d{3})+(?!\d)|\d+)(?>(?:\.\d+)?)(?![,.]?\d|[a-zA-Z])"
    r"(?!\s*+(?:[-+*/^!%_=<>({]|\d|\\(?![)\]\\]|[,;:\s](?!\s*\d)|text|mbox|q?quad)))"
)
_BOX = re.compile(r"(?<!\\)\\+(?:boxed|fbox)")
_TOKENS = re.compile(rf"\\(?:boxed|fbox)\s*(?:\{{|(?P<bare>{_NUMERAL}))|\\.|[{{}}]", re.DOTALL)
# What may stand between boxes that are one answer; a name before the second, y_2 =, may too.
_BETWEEN = re.compile(
    r"(?:[\s$*.,;&]|\\[()\[\],;:! \\]|\\q?quad(?![a-zA-Z])|\\text\s*\{[\s,]*(?:and|or)?[\s,]*\}|\b(?:and|or)\b"
    r"|[a-zA-Z](?:_\w|_\{\w+\})?\s*=\s*(?=[$\s]*$))*"
)
_LONGEST_BETWEEN = 60

_WIDE = re.compile(r"(?:\\[;: ]|\s)+")
# Not between digits, where it may part two numbers, nor between letters, where it may cut a command in two.
_SPACES = re.compile(
    # Dollar signs at the ends only.
    r"^\s*\$+|(?<=[-+])\s*\$+|\$+\s*$|"
    r"(?<![\d,a-zA-Z])\s|\s(?![\d,a-zA-Z])|(?<=[\d,])\s(?=[a-zA-Z])|(?<=[a-zA-Z])\s(?=[\d,])|"
    r"\\!|(?<!\d)\\,|\\,(?!\d)|(?<=\d)\\,(?=\d{3}(?!\d))|\\left|\\right"
)
# ``0,111`` is not a number with thousands; Math-Verify reads it as 0.111.
_DECIMAL = r"([1-9]\d{0,2}(?:,\d{3})+|\d+)?(?:\.(\d*))?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?P<top>{_DECIMAL})(?:/(?P<bottom>{_DECIMAL}))?"
    r"(?:(?:[eE]|(?:\\times|\\cdot|\*)10\^)(?P<exponent>[-+]?\d{1,3}|\{[-+]?\d{1,3}\}))?",
    # Digits of other scripts are not a numeral for Math-Verify either.
    re.ASCII,
)
# Not beside a digit: two and a half, ``2\frac{1}{2}``, is not a numeral, and certainly not 21/2.
_FRACTION = re.compile(r"(?<![\d.,/}])([-+]?)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}(?![\d.])")
_LONGEST_NUMBER = 60
# Drawn as a blank, besides white space, control and format characters, and marks that stand on no letter.
_BLANKS = "\u115f\u1160\u2800\u3164\uffa0"
_UNSEEN = {"Cc", "Cf", "Mn"}
# As it stands in a sentence: a minus sign behind a digit, a letter or a bracket is a difference.
_IN_TEXT = re.compile(
    r"(?:(?<![\w)}\]])-)?(?:\\[dt]?frac\{-?\d{1,30}\}\{-?\d{1,30}\}"
    r"|(?<![\w.])(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)?+(?:\.\d++)?+(?<=\d)(?:/\d++|[eE][-+]?\d{1,3}(?!\w))?+)",
    re.ASCII,
)


def last_boxed(text: str) -> str | None:
    r"""Content of the last balanced ``\boxed{...}`` (or ``\fbox``), None if there is none.

    Last = the one that closes last, so the outer one of two nested boxes. A box that is never closed is none, and takes
    back those before it: ``\boxed{1} no, \boxed{2`` has no answer. ``\{`` and ``\}`` are not braces, and ``\boxed 5``
    is a box of a numeral. Boxes with nothing but commas, ``and``,
    ``or`` and blanks between them are one answer, the list of their contents: ``\boxed{1} and \boxed{2}`` is ``1, 2``.
    Linear in the length of `text`, however many boxes are in it.
    """
    first = _BOX.search(text)
    if first is None:
        return None
    # Of each open brace: where its box and its content start, or None.
    stack: list[tuple[int, int] | None] = []
    # Start, start of the content, end of the content, end. Boxes within others are left out.
    boxes: list[tuple[int, int, int, int]] = []
    # No brace before it closes a box.
    for token in _TOKENS.finditer(text, first.start()):
        symbol = token.group()
        if symbol == "{":
            stack.append(None)
        elif symbol == "}":
            box = stack.pop() if stack else None
            if box is not None:
                while boxes and boxes[-1][0] > box[0]:
                    boxes.pop()
                boxes.append((*box, token.start(), token.end()))
        elif token["bare"]:
            boxes.append((token.start(), token.start("bare"), token.end(), token.end()))
        elif symbol.endswith("{") and len(symbol) > 2:
            stack.append((token.start(), token.end()))
    opened = max((box[0] for box in stack if box is not None), default=-1)
    return _joined(text, boxes) if boxes and opened < boxes[-1][0] else None


def _joined(text: str, boxes: list[tuple[int, int, int, int]]) -> str:
    contents: list[str] = []
    following: int | None = None
    for start, content, content_end, end in reversed(boxes):
        if following is not None:
            between = following - end
            if between > _LONGEST_BETWEEN or not _BETWEEN.fullmatch(text, end, following):
                break
        contents.append(text[content:content_end].strip())
        following = start
    return ", ".join(dict.fromkeys(reversed(contents)))


def is_blank(text: str) -> bool:
    """Whether a reader sees nothing in a text: blanks, zero-width and other invisible characters."""
    return all(c.isspace() or c in _BLANKS or unicodedata.category(c) in _UNSEEN for c in text)


def take_answer(text: str, where: AnswerIn) -> str | None:
    r"""The answer of a rollout, None where it gives none or a blank one; the last one where it gives several.

    Args:
        text: the rollout.
        where: ``box``: the last balanced ``\boxed{...}``; ``tag``: the last ``<answer>...</answer>``; ``hashes``: the
            rest of the line after the last ``####``; ``last_line``: the last line that is not empty; ``last_number``:
            the last numeral or fraction of two; ``whole``: all of the text. The last three begin after ``</think>``,
            if there is one.
    """
    found = _found(text, where)
    return None if found is None or is_blank(found) else found


def _found(text: str, where: AnswerIn) -> str | None:
    if where == "box":
        return last_boxed(text)
    if where == "tag":
        end = text.rfind("</answer>")
        start = text.rfind("<answer>", 0, max(end, 0))
        return text[start + len("<answer>") : end].strip() if start >= 0 else None
    if where == "hashes":
        _, mark, rest = text.rpartition("####")
        return rest.partition("\n")[0].strip() if mark else None
    visible = text.rpartition("</think>")[2].strip()
    if where == "last_number":
        return next((match.group() for match in reversed(list(_IN_TEXT.finditer(visible)))), None)
    return visible.rpartition("\n")[2].strip() if where == "last_line" else visible


def plain_number(answer: str) -> Fraction | None:
    r"""The exact value of an answer that is one numeral, None if it is anything else.

    Known: ``-1,000``, ``27.0``, ``3/4``, ``\frac{3}{4}``, ``-1./3``, and a power of ten behind it, ``1.5e-3``,
    ``1.5 \times 10^{-3}``. Numerals of more than 60 characters and exponents of more than 3 digits are not read.
    """
    if len(answer) > _LONGEST_NUMBER:
        return None
    text = _SPACES.sub("", _WIDE.sub(" ", answer)).replace("{,}", ",")
    match = _NUMBER.fullmatch(_FRACTION.sub(r"\1\2/\3", text))
    if match is None or (match["bottom"] is not None and "e" in text.lower()):
        return None
    top, bottom = (_decimal(match[name]) for name in ("top", "bottom"))
    if top is None or (match["bottom"] is not None and not bottom):
        return None
    exponent = int((match["exponent"] or "0").strip("{}"))
    return (-1 if match["sign"] == "-" else 1) * top / (bottom or 1) * Fraction(10) ** exponent


def _decimal(text: str | None) -> Fraction | None:
    return Fraction(text.replace(",", "")) if text and text != "." else None


def is_prose(gold: str) -> bool:
    """Whether a gold has words of four letters or more: with a digit at least three, since units are no prose.

    Commands of LaTeX do not count.
    """
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{4,}", gold)
    return len(words) > (2 if re.search(r"\d", gold) else 0)


def is_sentence(gold: str) -> bool:
    """Whether a gold is prose of more words than a name has, so that hardly any rollout says exactly these."""
    return is_prose(gold) and len(gold.split()) > 3


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text to grade: the rollout itself, or the last assistant message of a conversation."""
    if isinstance(completion, str):
        return completion
    return _last_turn(completion).get("content") or ""


def thought(completion: str | list[dict[str, str]]) -> str | None:
    """The thought that a response schema has moved out of the text of the last assistant message; None without one."""
    message = {} if isinstance(completion, str) else _last_turn(completion)
    return message.get("reasoning_content") or message.get("thinking")


def _last_turn(messages: list[dict[str, str]]) -> dict[str, str]:
    return next((message for message in reversed(messages) if message.get("role") == "assistant"), {})
