"""The processes of a test, beside the trainer's. A script; imports nothing of basis_rl.

``parse PATH`` says which of the sources in its standard input is a program.

``program PATH`` runs the model's code. It reads ``{"name": ..., "args": [...], "kwargs": {...}}``, one a line, and
answers ``{"value": ...}``, ``{"error": name of an exception, "message": ...}`` or ``{"object": name of a class}``.
Nothing there is trusted: the code may write whatever it likes to where the answers go. What it cannot know is what is
expected, which is in another process.

``tests PATH`` runs the data set's tests. Every name that they use and do not define, or import from ``solution``, is a
function of the other process: calling it sends the arguments there and returns what comes back. So the code under test
never sees an expected value, has no object of its own in a comparison, and cannot reach the verdict: a line in the
standard error of the tests' process, which is a file.

Values travel as text: plain data only, so that reading them runs nothing.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import symtable
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, SimpleNamespace
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


class NotPlainError(TypeError):
    """A value is not plain data."""


def encode(value: Any, numpy: Any = None) -> Any:
    """JSON for None, bool, int, float, complex, str, bytes and list, tuple, set, dict of these; subclasses lose theirs.

    Args:
        value: of these types.
        numpy: the module, whose arrays and scalars then are lists and numbers.

    Raises:
        NotPlainError: anything else.
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
            return {name: [encode(item, numpy) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, numpy), encode(item, numpy)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return encode(value.tolist(), numpy)
    raise NotPlainError(f"a {type(value).__name__} is not plain data")


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
        owner, _, name = request["name"].rpartition(".")
        try:
            if broken is not None:
                raise ImportError(broken)
            args = [decode(value) for value in request["args"]]
            kwargs = {key: decode(value) for key, value in request["kwargs"].items()}
            method = owner or (name not in namespace and "Solution" in namespace)
            function = getattr(namespace["Solution"](), name) if method else namespace[name]
            value = function(*args, **kwargs)
            try:
                # Imported only if the program did so, which saves its time for the others.
                answer = {"value": encode(value, sys.modules.get("numpy"))}
            except NotPlainError:
                answer = {"object": type(value).__name__}
        except BaseException as error:
            # Of the candidate, and told to the tests.
            answer = {"error": type(error).__name__, "message": str(error)[:1000]}
        answers.write(json.dumps(answer) + "\n")


def run_parse(path: str) -> None:
    """Print the index of the first source, of a JSON list in the standard input, that can be a program.

    It must be Python that calls or defines something: ``34`` and ``yes`` are Python as well.
    """
    for index, source in enumerate(json.load(sys.stdin)):
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if any(isinstance(node, (ast.Call, ast.FunctionDef, ast.ClassDef)) for node in nodes):
            print(index)
            return


class Unsupported(BaseException):
    """The tests cannot be run across processes: they pass or need something that is not plain data."""


class Gone(BaseException):
    """The other process has ended, or writes something unexpected."""


# Attributes that a result can have: all types that travel.
_ATTRIBUTES = {name for kind in (int, float, complex, str, bytes, list, tuple, set, dict) for name in dir(kind)}
# What tests call the file with the code under test.
_OWN_MODULES = ("solution", "main", "submission")
# Tests that name these look into the process of the code under test, or share objects with it.
_SHARED = frozenset(
    ("mock", "patch", "Mock", "MagicMock", "capsys", "capfd", "caplog", "monkeypatch", "tmp_path", "stdout", "stdin",
     "redirect_stdout", "ListNode", "TreeNode", "list_node", "tree_node", "is_same_list", "is_same_tree")
)  # fmt: skip


class Object:
    """Stands for a result that is not plain data: every comparison with it fails."""

    def __init__(self, function: str) -> None:
        self._function = function

    def _fail(self, other: Any = None) -> Any:
        raise TypeError("the result is not plain data")

    __eq__ = __ne__ = __bool__ = __hash__ = __str__ = __repr__ = _fail

    def __getattr__(self, name: str) -> Any:
        # No plain result has it, or a class is meant: no code can pass. Otherwise it is this code that is wrong.
        if name.startswith("__") or (name in _ATTRIBUTES and not self._function[:1].isupper()):
            raise AttributeError(name)
        raise Unsupported(f"the tests use '{name}' of an object")


class Functions:
    """The module of the code under test, or an object of its class ``Solution``: functions by name."""

    def __init__(self, remote: Callable[[str], Any], prefix: str) -> None:
        self._remote = remote
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote(self._prefix + name)


class Approx:
    """``pytest.approx``: numbers, and lists, tuples and dictionaries of them."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected = expected
        self.absolute = 1e-12 if abs is None else abs
        self.relative = rel if rel is not None else 1e-6 if abs is None else 0.0

    def __eq__(self, other: Any) -> bool:
        return self._near(other, self.expected)

    def _near(self, value: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            same = isinstance(value, dict) and value.keys() == expected.keys()
            return same and all(self._near(value[key], expected[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            same = isinstance(value, (list, tuple)) and len(value) == len(expected)
            return same and all(map(self._near, value, expected))
        return value == expected or abs(value - expected) <= max(self.absolute, self.relative * abs(expected))


class Pytest:
    """What most tests use of pytest; tests that use more are not scored."""

    approx = Approx
    mark = property(lambda self: self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(f"pytest.{name}")

    @staticmethod
    @contextmanager
    def raises(expected: Any, match: str = "") -> Iterator[Any]:
        """An exception is raised in this context."""
        caught = SimpleNamespace(type=expected, value=None)
        try:
            yield caught
        except expected as error:
            caught.value = error
            if not re.search(match, str(error)):
                raise AssertionError(f"no {match!r}") from None
        if caught.value is None:
            raise AssertionError("nothing was raised")

    @staticmethod
    def parametrize(names: Any, values: Any, ids: Any = None) -> Callable[[Any], Any]:
        """Gives a test its rows of arguments."""
        keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(keys, row if len(keys) > 1 else (row,), strict=True)) for row in values]

        def decorate(test: Any) -> Any:
            test.rows = [{**old, **row} for row in rows for old in getattr(test, "rows", [{}])]
            return test

        return decorate


def unbound_names(source: str) -> set[str]:
    """The names that the source uses and neither defines nor imports."""
    used: set[str] = set()
    bound = set(dir(builtins))
    scopes = [symtable.symtable(source, "tests.py", "exec")]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_assigned() or symbol.is_parameter() or symbol.is_imported():
                bound.add(symbol.get_name())
            elif symbol.is_global():
                used.add(symbol.get_name())
    return used - bound


def needs_objects(tree: ast.Module, remote: set[str]) -> bool:
    """Whether right code cannot pass: tests that look at what a call did to its arguments, or need more than calls."""
    nodes = list(ast.walk(tree))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        words = {getattr(node, key, None) for key in ("id", "attr", "arg", "name", "module")}
        if not words.isdisjoint(_SHARED):
            return True
        # A class of the code under test, in `except`, `isinstance` or the like.
        if isinstance(node, ast.Name) and node.id in remote and node.id[:1].isupper() and id(node) not in called:
            return True
    scopes = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    outside = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.value) == "Solution()"]
    own = {"Solution()", *(ast.unparse(target) for node in assigned for target in node.targets)}
    return any(changes_arguments(scope, remote, own) for scope in [*scopes, ast.Module(outside, [])])


def changes_arguments(scope: ast.AST, remote: set[str], own: set[str]) -> bool:
    """Whether the result of a call is left, and a variable that was an argument is used later.

    Args:
        scope: a function, or a module without its functions.
        remote: functions of the code under test.
        own: objects that have them as methods.
    """
    nodes = list(ast.walk(scope))
    # Where an exception is expected, nothing else of the call matters.
    raising: list[ast.AST] = [node for node in nodes if isinstance(node, ast.Try)]
    raising += [node for node in nodes if isinstance(node, ast.With) and "aises(" in ast.unparse(node.items[0])]
    skipped = {id(node) for outer in raising for node in ast.walk(outer)}
    for node in nodes:
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call) or id(node) in skipped:
            continue
        name, _, method = ast.unparse(node.value.func).rpartition(".")
        if name in own or (not name and method in remote):
            values = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
            given = {value.id for value in values if isinstance(value, ast.Name)}
            if any(isinstance(n, ast.Name) and n.id in given and n.lineno > node.lineno for n in nodes):
                return True
    return False


def run_found(namespace: dict[str, Any]) -> None:
    """Run what unittest or pytest would find."""
    unittest: Any = sys.modules.get("unittest")
    for name, value in list(namespace.items()):
        if isinstance(value, FunctionType) and name.startswith("test"):
            call_rows(value)
        elif isinstance(value, type) and unittest is not None and issubclass(value, unittest.TestCase):
            unittest.defaultTestLoader.loadTestsFromTestCase(value).debug()
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [key for key in dir(value) if key.startswith("test")]:
                tests = value()
                getattr(tests, "setup_method", lambda: None)()
                call_rows(getattr(tests, method))


def call_rows(test: Any) -> None:
    """One test of pytest, with each row of its arguments."""
    from inspect import signature

    for row in getattr(test, "rows", [{}]):
        try:
            signature(test).bind(**row)
        except TypeError:
            raise Unsupported("a fixture") from None
        test(**row)


def run_tests(path: str) -> None:
    """Run the tests of a file with functions of the other process; the verdict goes to the standard error."""
    answers, requests = channel()
    # The tests, which may print to the standard error, get /dev/null in its place.
    verdict = os.dup(2)
    os.dup2(0, 2)
    calls = 0
    raised: list[Exception] = []

    def remote(name: str) -> Any:
        if name == "Solution":
            return lambda: Functions(remote, "Solution.")

        def function(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            try:
                given = {"args": [encode(a) for a in args], "kwargs": {k: encode(v) for k, v in kwargs.items()}}
            except NotPlainError as error:
                raise Unsupported(str(error)) from None
            try:
                requests.write(json.dumps({"name": name, **given}) + "\n")
                answer = json.loads(answers.readline())
                if "object" in answer:
                    return Object(name)
                if "error" not in answer:
                    return decode(answer["value"])
                raised.append(exception(str(answer["error"]), str(answer.get("message", ""))))
            except Exception as error:
                raise Gone(type(error).__name__) from None
            raise raised[-1]

        return function

    with open(path, encoding="utf-8") as file:
        tests = json.load(file)
    try:
        run_source(tests["source"], tests["entry_point"], remote)
        said = "pass" if calls else "unsupported"
    except BaseException as error:
        # Whatever a test raises is its verdict, unless it is the tests' own inability.
        said = "unsupported" if is_inability(error) and not any(error is known for known in raised) else "fail"
    os.write(verdict, f"{said}\n".encode())


def exception(name: str, message: str) -> Exception:
    """What a call raised, as one of Python's own."""
    kind = getattr(builtins, name, None)
    # StopIteration would end a loop of the tests as if the loop had been done.
    if isinstance(kind, type) and issubclass(kind, Exception) and not name.startswith("Stop"):
        with suppress(TypeError):
            return kind(message)
    return RuntimeError(message)


def is_inability(error: BaseException) -> bool:
    """Whether tests cannot be run here, or look at what no plain value has."""
    if isinstance(error, AttributeError):
        return error.name is not None and error.name not in _ATTRIBUTES
    return isinstance(error, (Unsupported, SyntaxError, ImportError, OSError)) or type(error).__name__ == "SkipTest"


def run_source(source: str, entry_point: str | None, remote: Callable[[str], Any]) -> None:
    """Run tests: statements, a function ``check``, or what unittest or pytest would find."""
    tree = ast.parse(source)
    unbound = unbound_names(source)
    own = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in _OWN_MODULES]
    imported = {alias.asname or alias.name for node in own for alias in node.names}
    if needs_objects(tree, {*unbound, *imported, "candidate"} - {"Solution"}):
        raise Unsupported("more than results")
    modules: dict[str, Any] = {"pytest": Pytest(), **dict.fromkeys(_OWN_MODULES, Functions(remote, ""))}
    # What the tests import by these names.
    sys.modules.update(modules)
    namespace = {name: remote(name) for name in unbound}
    namespace.update(__name__="tests", __file__="tests.py")
    exec(compile(tree, "tests.py", "exec"), namespace)
    if entry_point and "check" in namespace:
        # LeetCode's entry point is Solution().name, and a request names it Solution.name.
        namespace["check"](remote(entry_point.replace("()", "")))
    run_found(namespace)


if __name__ == "__main__":
    {"program": run_program, "tests": run_tests, "parse": run_parse}[sys.argv[1]](sys.argv[2])
