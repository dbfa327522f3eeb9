"""The user's turn, from a row and a template: ``{column}`` stands for a cell, or a Jinja template is filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FILES = (".jinja", ".jinja2", ".j2")
# Of a command of LaTeX the braces hold an argument: `\boxed{answer}`.
_PLACE = re.compile(r"(\\[A-Za-z]+)?\{([A-Za-z_][\w.]*)\}")


def _printed(value: Any) -> Any:
    """An empty cell is nothing, not the word None."""
    return "" if value is None else value


_JINJA = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printed
)


def read_template(template: str) -> str:
    """The template, read from its file if it is the path of a Jinja file.

    Raises:
        ValueError: there is no such file.
    """
    if "\n" in template or Path(template).suffix not in _FILES:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"prompt_template: the file '{template}' cannot be read: {error.strerror}.") from error


@lru_cache(maxsize=4)
def places(template: str) -> frozenset[str]:
    """The names that a template has places for.

    Raises:
        ValueError: it is not Jinja, although it has ``{{`` or ``{%``.
    """
    if not is_jinja(template):
        return frozenset(name for command, name in _PLACE.findall(template) if not command)
    try:
        return frozenset(meta.find_undeclared_variables(_JINJA.parse(template)))
    except TemplateError as error:
        raise ValueError(
            f"prompt_template has {{{{ or {{%, which makes it a Jinja template, but as one it is wrong: {error}. Other "
            "templates have single braces: {prompt}, \\boxed{}."
        ) from error


def filled(template: str, values: Mapping[str, Any]) -> str:
    """The template with the values in their places; a list is written as lines, unless Jinja says how.

    Raises:
        ValueError: a Jinja template fails for this row.
    """
    if not is_jinja(template):
        return _PLACE.sub(lambda found: found[0] if found[1] else as_text(values[found[2]]), template)
    try:
        return _compiled(template).render(values)
    except Exception as error:
        # A template is a program, which may fail in any way.
        raise ValueError(f"prompt_template: the Jinja template fails for a row: {error}") from error


def is_jinja(template: str) -> bool:
    """Whether it has what only Jinja has."""
    return "{{" in template or "{%" in template


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    return _JINJA.from_string(template)


def as_text(value: Any) -> str:
    """A cell as it stands in a prompt."""
    if isinstance(value, list):
        return "\n".join(map(as_text, value))
    return "" if value is None else str(value)
