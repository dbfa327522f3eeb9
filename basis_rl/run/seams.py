"""Replaces attributes of TRL's objects for a moment; `trainer/seams.md` lists which ones, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes within it, and put the old values back: for what TRL reads from an object and has no argument for.

    Args:
        owner: an object or a module of TRL's, which has the attributes already.
        **values: by name.
    """
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
