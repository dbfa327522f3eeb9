"""Which code a reward is, so that a changed one is noticed where its name has stayed."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any


def code_identity(reward: Any) -> str:
    """The reward's ``version`` with the module that states it, or a hash of its source.

    The hash covers what the reward calls in its own module, the constants (names in capitals) that these read there,
    and what a closure or an object was made with. Comments and line breaks do not count. A reward without source, as
    one that was typed into an interpreter, is its module.
    """
    if version := getattr(reward, "version", None):
        return f"{_module(reward)} {version}"
    parts = list(_parts(reward, set()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else _module(reward)


def arguments_version(arguments: Mapping[str, Any]) -> str:
    """What a reward's version says of the arguments that a recipe gives it: a hash, since it is in logs and cards."""
    given = json.dumps(arguments, sort_keys=True, default=str)
    return f"arguments {hashlib.sha256(given.encode()).hexdigest()[:12]}"


def _module(reward: Any) -> str:
    """Where it is written; ours may move within the package."""
    name = str(getattr(reward, "__module__", None) or type(reward).__module__)
    return "basis_rl" if name.startswith("basis_rl.") else name


def _parts(found: Any, seen: set[int]) -> Iterator[str]:
    """The texts that the hash is over."""
    if isinstance(found, partial):
        yield repr((found.args, sorted(found.keywords.items())))
        found = found.func
    if not (inspect.isroutine(found) or inspect.isclass(found)):
        # A class may have no signature.
        with suppress(ValueError):
            given = inspect.signature(type(found)).parameters
            yield from _constants({name: getattr(found, name, None) for name in given})
        found = type(found)
    if id(found) in seen:
        return
    seen.add(id(found))
    try:
        # Of what is decorated, the decorator's.
        text = textwrap.dedent(inspect.getsource(getattr(found, "__code__", found)))
    except (OSError, TypeError):
        return
    names: set[str] = set()
    # A lambda may stand within a longer expression.
    with suppress(SyntaxError):
        tree = ast.parse(text)
        text = ast.unparse(tree)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    yield text
    enclosed = _enclosed(found)
    yield from _constants(enclosed)
    scope = {**vars(sys.modules.get(found.__module__, ast)), **enclosed}
    beside = {name: scope[name] for name in sorted(names & scope.keys())}
    yield from _constants({name: value for name, value in beside.items() if name.isupper()})
    for value in (*beside.values(), getattr(found, "__wrapped__", None)):
        if inspect.isroutine(value) or inspect.isclass(value):
            yield from _parts(value, seen) if getattr(value, "__module__", "") == found.__module__ else ()


def _enclosed(found: Any) -> dict[str, Any]:
    """What a function uses of the one that it stands in. What is assigned there later has no value yet."""
    result = {}
    code = getattr(found, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), getattr(found, "__closure__", None) or (), strict=False):
        with suppress(ValueError):
            result[name] = cell.cell_contents
    return result


def _constants(values: dict[str, Any]) -> Iterator[str]:
    """Those whose text is the same in every process."""
    yield from (f"{name}={value!r}" for name, value in values.items() if _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | re.Pattern)
