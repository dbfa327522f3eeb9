"""The two processes of a test that calls functions. A script; imports nothing of basis_rl.

``program PATH`` runs the model's code. It reads ``{"name": ..., "args": [...], "kwargs": {...}}``, one a line, and
answers ``{"value": ...}`` or ``{"error": name of an exception}``. Nothing there is trusted: the code may write whatever
it likes to where the answers go. What it cannot know is what is expected, which is in another process.

``tests PATH`` runs the data set's tests. Every name that they use and do not define is a function of the other process:
calling it sends the arguments there and returns what comes back. So the code under test never sees an expected value,
has no object of its own in a comparison, and cannot reach the verdict: a line in the standard error of the tests'
process, which is a file.

Values travel as text: plain data only, so that reading them runs nothing.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

# What the usual sites import for everybody: starter code names `List` without an import.
_PRELUDE = """
from typing import *
from collections import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush
from bisect import bisect_left, bisect_right
from math import ceil, comb, floor, gcd, inf, sqrt
"""


_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any) -> Any:
    """JSON for None, bool, int, float, complex, str, bytes and list, tuple, set, dict of these; subclasses lose theirs.

    Raises:
        TypeError: anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (float, str)):
        return float(value) if isinstance(value, float) else str(value)
    if isinstance(value, int):
        # Of any length; decimal ones of more than 4300 digits are refused by Python.
        return {"int": hex(value)}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    raise TypeError(f"a {type(value).__name__} is not plain data")


def decode(data: Any) -> Any:
    """What `encode` was given, of exactly the built-in types.

    Raises:
        ValueError: it is nothing that `encode` writes (KeyError and TypeError too: what comes in is not trusted).
    """
    if data is None or type(data) in (bool, float, str):
        return data
    if type(data) is not dict or len(data) != 1:
        raise ValueError("no encoded value")
    ((name, content),) = data.items()
    if name == "int":
        return int(content, 16)
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item) for item in content)
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name == "complex":
        return complex(float(content[0]), float(content[1]))
    if name == "bytes":
        return bytes.fromhex(content)
    raise ValueError(f"no encoded value: {str(name)[:20]}")


def dump(message: dict[str, Any]) -> str:
    """One line."""
    return json.dumps(message) + "\n"


def channel() -> tuple[TextIO, TextIO]:
    """What the other process sends, and where to write to it; who prints or reads later does not meet either."""
    received = os.fdopen(os.dup(0))
    sent = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return received, sent


def run_program(path: str) -> None:
    """Execute the code in a file, then answer calls of its functions, or of the methods of its ``Solution``."""
    asked, answers = channel()
    namespace: dict[str, Any] = {"__name__": "candidate"}
    broken = None
    try:
        exec(_PRELUDE, namespace)
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), "candidate.py", "exec"), namespace)
    except BaseException as error:
        # The candidate may raise anything, SystemExit too; asked again, it says so.
        broken = type(error).__name__
    for line in asked:
        request = json.loads(line)
        name = request["name"]
        try:
            if broken is not None:
                raise ImportError(broken)
            args = [decode(value) for value in request["args"]]
            kwargs = {key: decode(value) for key, value in request["kwargs"].items()}
            method = name not in namespace and "Solution" in namespace
            function = getattr(namespace["Solution"](), name) if method else namespace[name]
            answer = {"value": encode(function(*args, **kwargs))}
        except BaseException as error:
            # Of the candidate, and told to the tests.
            answer = {"error": type(error).__name__}
        answers.write(dump(answer))


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


def run_tests(path: str) -> None:
    """Run the tests of a file with functions of the other process; the verdict goes to the standard error."""
    answers, requests = channel()
    verdict = os.dup(2)
    os.dup2(0, 2)
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
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            if kind in (StopIteration, StopAsyncIteration):
                # It would end a loop of the tests as if the loop had been done.
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
    except BaseException as error:
        # Whatever a test raises is its verdict.
        own = isinstance(error, (Unsupported, SyntaxError, ImportError)) and error is not raised
        said = "unsupported" if own else "fail"
    os.write(verdict, f"{said}\n".encode())


if __name__ == "__main__":
    {"program": run_program, "tests": run_tests}[sys.argv[1]](sys.argv[2])
