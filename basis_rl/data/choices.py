"""Options of multiple-choice questions, in the forms that data sets have them in, and the letter of the right one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from basis_rl.data.rows import gold_text

# Label and text.
Option = tuple[str, str]
# The place of the option that a gold names; None if it names none in this way.
Reading = Callable[[str, Sequence[Option]], int | None]
# "A. red", "(b) green", "1) blue".
_LABELLED = re.compile(r"\s*\(?([A-Za-z]|\d\d?)(?:\)\s*|[.:]\s+)(?=\S)(.+)", re.DOTALL)


def read_options(cells: Sequence[Any]) -> list[Option]:
    """The options of a row, from one cell for all of them, or from one for each.

    One cell may be a list of texts, a record ``{"text": [...], "label": [...]}`` (ARC), a record of texts by label
    (``{"A": ..., "B": ...}``), the text of any of these (in a .csv file), or lettered lines, ``A) one``. Labels that
    stand before the texts of a list are none of the texts.

    Raises:
        ValueError: these are no options, or more than there are letters.
    """
    cell = _parsed(cells[0]) if len(cells) == 1 else list(cells)
    found = []
    if isinstance(cell, Mapping | list):
        # `datasets` fills in the keys that other rows have, with None. A number is written as in a gold: 3.0 is 3.
        said = [(str(label).strip(), (gold_text(text) or "").strip()) for label, text in _pairs(cell)]
        found = [option for option in said if option[1]]
    if not 2 <= len(found) <= len(ascii_uppercase):
        forms = "a list of texts, {'text': [...], 'label': [...]}, lines 'A) one', or one column for each option"
        raise ValueError(f"{str(cell)[:100]} holds no options, which are {forms}")
    return found


def _parsed(cell: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    for read in (json.loads, ast.literal_eval):
        try:
            return read(cell)
        except (ValueError, SyntaxError):
            continue
    lines = cell.strip().splitlines()
    return lines if _labelled(lines) else cell


def _labelled(texts: Sequence[Any]) -> list[Option]:
    """Labels and texts, if each text begins with a label and these count up from ``A`` or ``1``; else none."""
    found = [_LABELLED.fullmatch(str(text)) for text in texts if text]
    pairs = [(match[1], match[2]) for match in found if match]
    labels = [label.upper() for label, _ in pairs]
    numbers = [str(number) for number in range(1, len(found) + 1)]
    return pairs if labels in (list(ascii_uppercase[: len(found)]), numbers) else []


def _pairs(cell: Any) -> Any:
    texts = cell if isinstance(cell, list) else cell.get("text")
    if not isinstance(texts, list):
        return cell.items()
    if labelled := _labelled(texts):
        return labelled
    labels = None if isinstance(cell, list) else cell.get("label")
    return zip(labels or ascii_uppercase.ljust(len(texts)), texts, strict=False)


def lettered(options: Sequence[Option]) -> str:
    """The options as lines: ``A. one``."""
    return "\n".join(f"{letter}. {text}" for letter, (_, text) in zip(ascii_uppercase, options, strict=False))


def _label(gold: str, options: Sequence[Option]) -> int | None:
    labels = [label.upper() for label, _ in options]
    bare = gold.strip("(). ").upper()
    if match := _LABELLED.fullmatch(gold):
        # "B) green" is B if that is green.
        index = _label(match[1], options)
        return index if index is not None and options[index][1] == match[2].strip() else None
    return labels.index(bare) if bare in labels else None


def _text(gold: str, options: Sequence[Option]) -> int | None:
    texts = [text for _, text in options]
    return texts.index(gold.strip()) if gold.strip() in texts else None


def _number(gold: str, options: Sequence[Option], first: int = 0) -> int | None:
    index = int(gold) - first if gold.isdecimal() else -1
    labels = [label.upper() for label, _ in options]
    if labels == sorted(labels) and set(labels) <= set(ascii_uppercase):
        # An option that is empty has its number all the same.
        return _label(ascii_uppercase[index], options) if 0 <= index < len(ascii_uppercase) else None
    return index if 0 <= index < len(options) else None


READINGS: dict[str, Reading] = {
    "labels": _label,
    "texts": _text,
    "numbers from 0": _number,
    "numbers from 1": lambda gold, options: _number(gold, options, first=1),
}


def how_read(rows: Sequence[tuple[str, Sequence[Option]]]) -> tuple[str, int]:
    """Which of the `READINGS` finds an option for most of the golds, and for how many; of several the first.

    It holds for all rows, since one alone does not tell from where numbers count: 1 to 4, and never 0, is from 1.
    """
    found = {name: sum(read(*row) is not None for row in rows) for name, read in READINGS.items()}
    best = max(found, key=found.__getitem__)
    return best, found[best]


def letter_of(gold: str, options: Sequence[Option], reading: str) -> str | None:
    """The letter of the option that a gold names; None if it names none."""
    index = READINGS[reading](gold, options)
    return None if index is None else ascii_uppercase[index]
