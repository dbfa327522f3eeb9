"""The process that the data set's tests run in, apart from the code under test. A script; imports nothing of basis_rl.

Every name that the tests use and do not define is a function of the other process: calling it sends the arguments there
and returns what comes back, plain data that is decoded here (`values`). So the code under test never sees an expected
value, has no object of its own in a comparison, and cannot reach the verdict: a line in this process's standard error,
which is a file.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from values import decode, dump, encode  # type: ignore[import-not-found]

del sys.path[0]


class Unsupported(BaseException):
    """The tests cannot be run across processes: they pass or need something that is not plain data."""


class Gone(BaseException):
    """The other process has ended, or writes something unexpected."""


def unbound_names(tree: ast.AST) -> set[str]:
    """The names that the source uses and neither defines nor imports."""
    used: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound


def main(path: str) -> None:
    answers, requests = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    verdict = os.dup(2)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    calls = 0
    raised: Exception | None = None

    def remote(name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, raised
            calls += 1
            try:
                given = {"args": [encode(a) for a in args], "kwargs": {k: encode(v) for k, v in kwargs.items()}}
            except TypeError as error:
                raise Unsupported(str(error)) from None
            try:
                requests.write(dump({"name": name, **given}))
                answer = json.loads(answers.readline())
                if "error" not in answer:
                    return decode(answer["value"])
            except Exception as error:
                raise Gone(type(error).__name__) from None
            kind = getattr(builtins, str(answer["error"]), None)
            # StopIteration would end a loop of the tests as if it had been done
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind in (
                StopIteration,
                StopAsyncIteration,
            ):
                kind = RuntimeError
            raised = kind()
            raise raised

        return function

    with open(path, encoding="utf-8") as file:
        tests = json.load(file)
    try:
        tree = ast.parse(tests["source"])
        names = unbound_names(tree)
        namespace: dict[str, Any] = {"__name__": "tests", **{name: remote(name) for name in names}}
        exec(compile(tree, "tests.py", "exec"), namespace)
        if tests["entry_point"]:
            namespace["check"](remote(tests["entry_point"]))
        said = "pass" if calls else "unsupported"
    except BaseException as error:  # whatever a test raises is its verdict
        own = isinstance(error, (Unsupported, SyntaxError, ImportError)) and error is not raised
        said = "unsupported" if own else "fail"
    os.write(verdict, f"{said}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
