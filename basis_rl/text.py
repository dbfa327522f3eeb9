"""Text for people: Jinja templates, which lie next to the code, and Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What asks for the \boxed{} that `math_verify` reads: of the benchmarks, and of recipes that set it.
BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."


def render(template: Path, *, html: bool = False, **values: Any) -> str:
    """A template filled in; with `html` every value is escaped. A name that is not given is an error."""
    from jinja2 import Environment, StrictUndefined

    settings: Any = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(autoescape=html, undefined=StrictUndefined, **settings)
    environment.filters["table"] = markdown_table
    return environment.from_string(template.read_text(encoding="utf-8")).render(**values)


# Characters that control a terminal, change the direction of writing or are invalid.
HARMFUL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def printable(text: str) -> str:
    """Replace harmful characters by their codes."""
    return re.sub(HARMFUL, lambda found: shown_code(found[0]), text).expandtabs(4)


def shown_code(character: str) -> str:
    """``\\x1b`` for an escape."""
    return f"\\x{ord(character):02x}"


def markdown_table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """A table of Markdown cells; a ``|`` in one is escaped, a line break becomes a space."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as plain text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def _cell(value: object) -> str:
    return " ".join(str(value).splitlines()).replace("|", "\\|")


def escape_markdown(text: str) -> str:
    """Text in a line or a table's cell, taken as it is; `markdown_table` escapes the ``|``."""
    text = re.sub(r"([\\`*_\[\]#])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
