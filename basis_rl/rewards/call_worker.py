"""The process in which somebody's function is called. Run as a script by `Calls`; imports nothing of basis_rl.

``{"describe": true}`` -> what the function takes, or ``{"broken": traceback}`` if it cannot be imported. Then
``{"args": [...], "kwargs": {...}}`` -> ``{"value": number or null}``, ``{"memory": true}`` or ``{"error": traceback}``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(target: str) -> Callable[..., Any]:
    """The function of ``module:name``, ``module.name`` or ``/path/of/file.py:name``."""
    if target.startswith("/"):
        path, _, name = target.rpartition(":")
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        where, _, name = target.replace(":", ".").rpartition(".")
        module = importlib.import_module(where)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{target} is a {type(function).__name__}, no function")
    return function


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """Its parameters, and a version: its own ``version``, or a hash of the file that it is written in."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    try:
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
    """What it returned, as JSON has it, or how it failed."""
    try:
        value = function(*args, **kwargs)
        value = value.item() if hasattr(value, "item") else value
        if value is not None and (not isinstance(value, (bool, int, float)) or not math.isfinite(value)):
            raise TypeError(f"it returned {str(value)[:100]!r}, not a finite number or None")
        return {"value": None if value is None else float(value)}
    except MemoryError:
        return {"memory": True}
    except Exception:
        return {"error": traceback.format_exc()[-4000:]}


def limit_memory(beyond: int) -> None:
    """Forbid more address space than `beyond` bytes above what the imports have taken."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit, hard = pages * resource.getpagesize() + beyond, resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(target: str, time_limit: float, memory_limit: int) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the function prints must not end up between the answers
    if not target.startswith("/"):
        sys.path.insert(0, os.getcwd())
    function, broken = None, ""
    try:
        function = load(target)
    except BaseException:
        broken = traceback.format_exc()[-4000:]
    limit_memory(memory_limit)
    out.write('{"ready": true}\n')
    for line in sys.stdin:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit)  # if the trainer dies meanwhile, nobody else ends this
        if function is None:
            result = {"broken": broken}
        elif "describe" in task:
            result = describe(function)
        else:
            result = call(function, task["args"], task["kwargs"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], time_limit=float(sys.argv[2]), memory_limit=int(sys.argv[3]))
