"""What makes two rows of a dataset the same problem: the prompt, and whatever else their reward depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any


def prompt_id(prompt: str | Sequence[Mapping[str, Any]], columns: Mapping[str, Any] | None = None) -> str:
    """16 hex digits that name a problem: SHA-256 of its prompt and of the `columns` that its reward reads.

    White space around a text does not count, and a conversation counts with all its messages. What is None does not
    count anywhere, since `datasets` fills in keys that other rows have. Without columns it is the prompt alone.
    """
    text = prompt.strip() if isinstance(prompt, str) else written(prompt)
    read = written(columns or {})
    # A row whose columns are all None must get the id of a row without columns.
    if read != "{}":
        text += f"\0{read}"
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def row_id(row: Mapping[str, Any], reads: Collection[str] | None) -> str:
    """The row's own ``prompt_id``, else that of its prompt and the columns in `reads`, or with None of all of them.

    A row without a prompt, which an environment makes, counts with all its columns.
    """
    if row.get("prompt_id") is not None:
        return str(row["prompt_id"])
    if reads is None or "prompt" not in row:
        reads = row.keys()
    return prompt_id(row.get("prompt") or "", {name: row[name] for name in reads if name in row and name != "prompt"})


def played_id(row: Mapping[str, Any], reads: Collection[str] | None, prompt: Any) -> str:
    """The id of a problem that an environment has drawn by itself: of its row, and of the prompt that it began with."""
    return prompt_id(prompt, {"row": row_id(row, reads)})


def written(value: Any) -> str:
    """A cell, or several, in its canonical form: the same text whichever format of datasets or library it came from.

    Keys that are None are left out. 1 and 1.0 are one number, since JSON and Parquet turn one into the other; True is
    another value. Arrays, tensors and tuples are lists, nested by shape; a picture is its mode, size and pixels.

    Raises:
        ValueError: an object that is none of these, and whose text is its address in memory.
    """
    return json.dumps(canonical(value), sort_keys=True, ensure_ascii=False)


def canonical(value: Any) -> Any:
    """`value` as JSON has it."""
    # Most cells are texts. True is an `int`, too.
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float | Decimal):
        number = float(value)
        return int(number) if number.is_integer() else number
    if isinstance(value, Mapping):
        return {str(key): canonical(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple | set | frozenset):
        entries = [canonical(entry) for entry in value]
        return entries if isinstance(value, list | tuple) else sorted(entries, key=repr)
    if hasattr(value, "tolist"):
        return canonical(value.tolist())
    if hasattr(value, "getpalette"):
        # The pixels of a picture with a palette are numbers of its colours.
        pixels = value.convert("RGBA") if value.getpalette() else value
        return [value.mode, value.size, hashlib.sha256(pixels.tobytes()).hexdigest()]
    text = str(value)
    if " at 0x" in text:
        raise ValueError(
            f"A column holds values of type {type(value).__name__}, known by their address alone: add "
            "a column prompt_id."
        )
    # A JSON reader makes a time of a text that is a date.
    return text.removesuffix(" 00:00:00")
