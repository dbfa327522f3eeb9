"""The tests of a row, in the forms that data sets have them in, and when an output is the expected one."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

_STDIN = ("stdin", "stdin_stdout", "standard_input")
_CALL = ("functional", "function_call", "call_based")
# HumanEval's `check` without a call: alone it tests nothing.
_UNCALLED = re.compile(r"^def check\((?!.*^check\()", re.MULTILINE | re.DOTALL)
# Source that has its own structure: it cannot be joined to others, as single statements can.
_TEST_SOURCE = re.compile(r"^\s*(?:def (?:test|check)|class \w*Test)", re.MULTILINE)
# LeetCodeDataset's arguments, such as `nums = [3, 1], k = 2`.
_BY_NAME = re.compile(r"\s*\w+ = ")
# With the lines of its body, and the closing bracket of its parameters.
_FUNCTION = re.compile(r"^def .*\n(?:(?:[ \t)].*)?\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One test.

    Attributes:
        kind: ``stdin``: a program that is given `given` and must print `expected`; ``call``: a function `name` that is
            called with the arguments `given` and must return `expected`; ``assert``: Python source `given` that must
            run to its end, with ``check(name)`` behind it where there is a `name`.
        given: see `kind`.
        expected: see `kind`.
        name: of the function.
        helpers: functions in the row's prompt, which tests of kind ``assert`` may use.
        count: tests that it stands for (`joined`), each of which has its time.
    """

    kind: Literal["stdin", "call", "assert"]
    given: Any
    expected: Any = None
    name: str | None = None
    helpers: tuple[str, ...] = ()
    count: int = 1


def parse_tests(cell: Any, fn_name: str | None = None, prompt: Any = None) -> list[Case]:
    """The tests in a cell: JSON, or the object that it stands for, or Python source.

    Known: ``{"inputs": [...], "outputs": [...]}`` with or without ``fn_name`` (APPS, TACO, verl), a list of
    ``{"input": ..., "output": ...}`` with or without ``fn_name`` and ``type`` or ``testtype`` (LiveCodeBench), the same
    below ``test_cases`` (PrimeIntellect, Open-R1) or ``tests``, ``assert`` statements as a list (MBPP's ``test_list``)
    or one text, ``{"asserts": [...], "setup": ...}``, ``{"test": "def check(candidate): ...", "entry_point": ...}``
    (HumanEval), ``{"functional": "...check(Solution().name)"}`` (LeetCode), and the source of tests for unittest or
    pytest, as the cell or as ``{"test": ...}`` (KodCode).

    Args:
        cell: the tests.
        fn_name: of the function, where the tests do not name it; or JSON with a ``func_name``.
        prompt: of the row, whose Python code may have functions that the tests need.

    Returns:
        The tests; empty where the cell has none in one of these forms.
    """
    try:
        helpers = _helpers(prompt)
        return [replace(case, helpers=helpers) for case in _cases(cell, _function_name(fn_name))]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, SyntaxError):
        # Cells can hold anything, such as text that is not JSON, or a test without an output.
        return []


def _cases(cell: Any, name: str | None) -> list[Case]:
    if isinstance(cell, str) and _TEST_SOURCE.search(cell) and not cell.lstrip().startswith(("{", "[", '"')):
        return _source(cell, name)
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            return _statements(cell)
    if isinstance(cell, Mapping):
        name = _function_name(cell) or name
        for source in (cell.get("functional"), cell.get("test"), cell.get("tests")):
            if isinstance(source, str):
                return _source(source, cell.get("entry_point") or name)
        if cell.get("asserts"):
            return _asserts(cell["asserts"], str(cell.get("setup") or ""))
        if cell.get("inputs") is not None:
            outputs = cell.get("outputs") or []
            cases = [_case({"input": i, "output": o}, name) for i, o in zip(cell["inputs"], outputs, strict=True)]
            # APPS and TACO have either each result of a function in a list of its own, or none of a row.
            wrapped = name and all(isinstance(output, list) and len(output) == 1 for output in outputs)
            return [replace(case, expected=case.expected[0]) for case in cases] if wrapped else cases
        cell = cell.get("test_cases") or cell.get("tests")
    if not isinstance(cell, Sequence) or isinstance(cell, str):
        return []
    if all(isinstance(item, str) for item in cell):
        return _asserts(cell, "")
    return [_case(item, name) for item in cell]


def _source(text: str, name: str | None) -> list[Case]:
    """Test source as one case; none where it leaves open which function its ``check(candidate)`` is to test."""
    return [] if not name and _UNCALLED.search(text) else [Case("assert", text, name=name)]


def _statements(text: str) -> list[Case]:
    """A case for each ``assert`` behind the statements that prepare them; one for all if these stand between."""
    tree = ast.parse(text)
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("no assert")
    parts = tree.body
    # MBPP+ has its only one in a function.
    first = next((index for index, part in enumerate(parts) if isinstance(part, ast.Assert)), None)
    if first is None or not all(isinstance(part, ast.Assert) for part in parts[first:]):
        return _asserts([text], "")
    sources = [ast.get_source_segment(text, part) or "" for part in parts]
    return _asserts(sources[first:], "\n".join(sources[:first]))


def _asserts(statements: Sequence[str], setup: str) -> list[Case]:
    return [Case("assert", f"{setup}\n{statement}") for statement in statements]


def _case(item: Mapping[str, Any], name: str | None) -> Case:
    name = _function_name(item) or name
    kind = item.get("type") or item.get("testtype")
    if not name and kind in _CALL:
        raise ValueError("tests of a function without its name")
    if not name or kind in _STDIN:
        return Case("stdin", _text(item["input"]), _text(item["output"]))
    given = item["input"]
    expected = item["output"]
    # As text, one JSON value a line and one for the result; beside other input a text is a result as it is.
    if isinstance(given, str):
        if isinstance(expected, str):
            with contextlib.suppress(ValueError):
                expected = json.loads(expected)
        try:
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
        except ValueError:
            if _BY_NAME.match(given):
                raise ValueError("arguments by name, which a text that is one argument could be too") from None
            given = [given]
    return Case("call", given if isinstance(given, list) else [given], expected, str(name))


def _helpers(prompt: Any) -> tuple[str, ...]:
    """What looks like functions in a text, or in what the user says in a conversation."""
    said = [prompt] if isinstance(prompt, str) else [str(m["content"]) for m in prompt or () if m["role"] == "user"]
    return tuple(_FUNCTION.findall("\n".join([*said, ""])))


def _function_name(where: Any) -> str | None:
    """The name in an object, also in its ``metadata``, or in JSON of one; a text that is no such JSON is the name."""
    if isinstance(where, str):
        try:
            where = json.loads(where)
        except ValueError:
            return where
    if not isinstance(where, Mapping):
        return None
    return where.get("fn_name") or where.get("func_name") or _function_name(where.get("metadata"))


def joined(cases: Sequence[Case]) -> list[Case]:
    """One case for all of them, where all are statements."""
    if all(case.kind == "assert" and case.name is None and not _TEST_SOURCE.search(case.given) for case in cases):
        given = "\n".join(case.given for case in cases)
        return [replace(case, given=given, count=len(cases)) for case in cases[:1]]
    return list(cases)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def choose_cases(cases: Sequence[Case], most: int) -> list[Case]:
    """At most `most` of the tests, spread evenly and with the last: the first ones are often shown in the problem."""
    if len(cases) <= most:
        return list(cases)
    return [cases[(i + 1) * len(cases) // most - 1] for i in range(most)]


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """The same tokens between white space; one that is expected with a point may differ by the tolerance."""
    ours = printed.split()
    theirs = expected.split()
    return len(ours) == len(theirs) and all(
        a == b or ("." in b and _near(_number(a), _number(b), tolerance)) for a, b in zip(ours, theirs, strict=True)
    )


def same_value(answer: Any, expected: Any, tolerance: float) -> bool:
    """An encoded value (`harness.encode`) is this JSON value: tuples are lists, keys are strings, sets are nothing.

    The encoded one is not decoded: a model can write a set whose hashes all collide.
    """
    try:
        return _same(answer, expected, tolerance)
    except (RecursionError, ValueError, TypeError, KeyError, IndexError, OverflowError):
        return False


def _same(answer: Any, expected: Any, tolerance: float) -> bool:
    if expected is None or isinstance(expected, (bool, str)):
        return type(answer) is type(expected) and answer == expected
    if isinstance(expected, (int, float)):
        if isinstance(answer, dict):
            answer = int(answer["int"], 16)
        elif type(answer) is not float:
            return False
        return bool(answer == expected) if isinstance(expected, int) else _near(float(answer), expected, tolerance)
    if isinstance(expected, list):
        items = answer.get("list", answer.get("tuple")) if isinstance(answer, dict) else None
        return (
            isinstance(items, list)
            and len(items) == len(expected)
            and all(_same(a, b, tolerance) for a, b in zip(items, expected, strict=True))
        )
    pairs = answer.get("dict") if isinstance(answer, dict) else None
    if not isinstance(pairs, list) or len(pairs) != len(expected):
        return False
    named = {_key(key): value for key, value in pairs}
    # A KeyError is no for an answer.
    return all(_same(named[k], v, tolerance) for k, v in expected.items())


def _key(key: Any) -> str:
    return str(int(key["int"], 16)) if isinstance(key, dict) else str(key)


def _number(token: str) -> float:
    try:
        return float(token)
    except ValueError:
        return float("nan")


def _near(a: float, b: float, tolerance: float) -> bool:
    """Whether `a` is within the tolerance of the expected `b`, absolute or relative, and `b` is not lost in it."""
    if a == b or not math.isfinite(b):
        return a == b
    # 0 is not 0.0000004; but what is smaller than the noise of floats is 0.
    most = max(abs(b) / 10, 1e-12) if b else tolerance
    return abs(a - b) <= min(most, tolerance * max(1.0, abs(b)))
