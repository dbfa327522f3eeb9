"""The process in which a user's function is called. Run as a script by `Calls`; imports nothing of basis_rl.

``{"describe": true}`` -> what the function takes, or ``{"error": traceback}`` if it cannot be imported. Then
``{"args": [...], "kwargs": {...}}`` -> ``{"value": number or null}``, ``{"memory": true}`` or ``{"error": traceback}``.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(target: str) -> Callable[..., Any]:
    """The function of ``module:name``, ``module.name`` or ``/path/of/file.py:name``."""
    if target.startswith("/"):
        path, _, name = target.rpartition(":")
        return runpy.run_path(path)[name]
    where, _, name = target.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(where), name)


def signature_and_version(function: Callable[..., Any]) -> dict[str, Any]:
    """The function's parameters, and its version: its attribute ``version``, or a hash of its source file."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    try:
        # The file of the function itself, not that of a decorator around it.
        source = Path(inspect.getsourcefile(inspect.unwrap(function)) or "").read_bytes()
    except (OSError, TypeError):
        source = b""
    return {
        "first": bool(parameters) and parameters[0].kind not in (parameters[0].KEYWORD_ONLY, parameters[0].VAR_KEYWORD),
        "parameters": [p.name for p in named[1:]],
        "required": [p.name for p in named[1:] if p.default is p.empty],
        "any": any(p.kind is p.VAR_KEYWORD for p in parameters),
        "asynchronous": inspect.iscoroutinefunction(function),
        "version": str(getattr(function, "version", None) or hashlib.sha256(source).hexdigest()[:12]),
    }


def call(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """One call as JSON: the value that the function returned, or how it failed."""
    try:
        value = function(*args, **kwargs)
        # Numbers of numpy and torch.
        value = value.item() if hasattr(value, "item") else value
        if value is not None and (not isinstance(value, (bool, int, float)) or not math.isfinite(value)):
            raise TypeError(f"it returned {str(value)[:100]!r}, not a finite number or None")
        return {"value": None if value is None else float(value)}
    except MemoryError:
        return {"memory": True}
    except Exception:
        return {"error": traceback.format_exc()[-4000:]}


_loaded: dict[str, Any] = {}


def start() -> None:
    """Import the function; if that fails, every task is answered with the traceback."""
    target = sys.argv[1]
    if not target.startswith("/"):
        sys.path.insert(0, os.getcwd())
    try:
        _loaded["function"] = load(target)
    except BaseException:
        # BaseException, because a module that calls sys.exit raises SystemExit.
        _loaded["error"] = traceback.format_exc()[-4000:]


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """The answer to one task."""
    if "error" in _loaded:
        return _loaded
    return signature_and_version(_loaded["function"]) if "describe" in task else call(_loaded["function"], **task)


if __name__ == "__main__":
    serve_tasks = runpy.run_path(str(Path(__file__).with_name("serve_tasks.py")))["serve_tasks"]
    serve_tasks(answer, float(sys.argv[2]), int(sys.argv[3]), start)
