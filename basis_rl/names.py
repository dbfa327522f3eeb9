"""Names that people give: the nearest known one for a misspelt one, the object behind a dotted path."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Collection
from typing import Any


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``" Did you mean 'x'?"`` for the known name that is nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def import_object(name: str, what: str) -> Any:
    """The object at a dotted path, ``module.name`` or ``module:name``; the working directory is searched too.

    Raises:
        ValueError: it cannot be imported.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The {what} '{name}' cannot be imported: {error}") from error
