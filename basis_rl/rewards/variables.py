"""Environment variables that a recipe names: their values reach a process or an address, and no message."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

_NAME = r"[A-Z_][A-Z0-9_]*|[a-z_]+"


def variables(owner: str, names: Sequence[str]) -> dict[str, str]:
    """Environment variables and their values.

    Raises:
        ValueError: `names` is not a list of names, or one of them is not set. What does not look like a name may be a
            key, and is not repeated.
    """
    if isinstance(names, (str, Mapping)) or not all(re.fullmatch(_NAME, str(name)) for name in names):
        raise ValueError(f"{owner}: give names of environment variables, such as OPENAI_API_KEY, never their values.")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"{owner}: the environment variable {missing[0]} is not set. Export it before the run.")
    return {name: os.environ[name] for name in names}


def without_values(text: str, values: Mapping[str, str]) -> str:
    """A text in which the names of variables stand where their values were."""
    for name, value in values.items():
        text = text.replace(value, f"<{name}>") if value else text
    return text
