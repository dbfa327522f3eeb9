"""Docstrings as the site shows them: what is written for people who read code becomes Markdown with links.

An extension of griffe, which mkdocstrings reads docstrings with.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import griffe

from website.build import EXPORTING

PLACES = {member: f"{name}.{member}" for name in EXPORTING for member in importlib.import_module(name).__all__}


def shown(text: str) -> str:
    """The docstring: ``::`` becomes a colon, roles become code, names of exported objects become links."""
    text = re.sub(r"::$", ":", text, flags=re.M)
    text = re.sub(r":\w+:`", "`", text)
    return re.sub(r"(?<![`\w])`(\w+)`(?!`)", lambda found: _linked(found[1]), text)


def _linked(name: str) -> str:
    return f"[`{name}`][{PLACES[name]}]" if name in PLACES else f"`{name}`"


class Shown(griffe.Extension):
    """Rewrites every docstring by `shown`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each object that it has loaded."""
        if obj.docstring is not None:
            obj.docstring.value = shown(obj.docstring.value)
