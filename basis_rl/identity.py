"""What makes two rows of a dataset the same problem: the prompt, and whatever else their reward depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
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


def written(value: Any) -> str:
    """A cell, or several, as one text; what is None does not count."""
    return json.dumps(_without_none(value), sort_keys=True, ensure_ascii=False, default=_as_text)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list | tuple) else value


def _as_text(value: Any) -> str:
    """Pictures and arrays by their bytes: as text they would be shortened, or have an address in memory."""
    return value.tobytes().hex() if hasattr(value, "tobytes") else str(value)
