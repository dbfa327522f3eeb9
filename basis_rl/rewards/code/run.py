"""One program, one test: run in a sandbox of its own, ended in time, judged from outside."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from basis_rl.rewards.code.harness import encode
from basis_rl.rewards.code.tests import Case, same_output, same_value
from basis_rl.sandbox import Policy
from basis_rl.sandbox.launch import CANNOT_START
from basis_rl.sandbox.run import Bounds, Finished, end, follow, run, start

Verdict = Literal["pass", "fail", "timeout", "no sandbox", "over budget"]
_START = str(Path(__file__).with_name("start.py"))
_HARNESS = str(Path(__file__).with_name("harness.py"))
# Whose tests one process runs where there is no program.
_ROWS = 64
_ATTEMPTS = 3
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
           "/usr/share/zoneinfo")  # fmt: skip


@lru_cache(maxsize=2)
def python(packages: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The interpreter's command, and all that it reads: no data set is in it, nor the working directory."""
    # Without packages it is not the virtual environment's interpreter, which would need its folder to start.
    real = os.path.realpath(sys.executable)
    base = {"base": sys.base_prefix, "installed_base": sys.base_prefix, "platbase": sys.base_prefix}
    readable = [real, *(sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib"))]
    readable += [os.path.join(sys.base_prefix, "lib"), *_SYSTEM, _START, _HARNESS]
    if packages:
        readable += [sys.prefix, *(sysconfig.get_path(name) for name in ("purelib", "platlib"))]
    kept = tuple(dict.fromkeys(path for path in readable if path and os.path.exists(path)))
    flags = ("-I", "-B", "-X", "utf8")
    return ((sys.executable, *flags) if packages else (real, *flags, "-S")), kept


@lru_cache(maxsize=1)
def numpy() -> tuple[str, ...]:
    """The folders of numpy, where it is installed: the package, and the libraries that come with it."""
    spec = find_spec("numpy")
    package = os.path.dirname(spec.origin) if spec is not None and spec.origin else ""
    return tuple(path for path in (package, f"{package}.libs") if os.path.isdir(path))


class Program:
    """The code of one rollout, in a folder of its own for as long as the context lasts.

    Args:
        sources: the code, or what may be it: the first that is Python then, or else the first.
        policy: what it may do for one test, beside reading itself and the interpreter. Its `file_bytes` bound the
            output too, unless a larger one is expected.
        packages: whether it may import what is installed here besides the standard library and numpy.
        tolerance: see `same_output`.
        deadline: of all its tests, a time of ``time.monotonic``.
    """

    def __init__(
        self, sources: Sequence[str], policy: Policy, packages: bool, tolerance: float, deadline: float = math.inf
    ) -> None:
        assert policy.cpu_seconds is not None
        self.policy = policy
        self.seconds = policy.cpu_seconds
        self.packages = packages
        self.tolerance = tolerance
        self.deadline = deadline
        self._folder = tempfile.TemporaryDirectory(prefix="basis-rl-code-")
        self.path = Path(self._folder.name) / "main.py"
        self.path.touch()
        source = sources[self._first_program(sources) if len(sources) > 1 and time.monotonic() < deadline else 0]
        self.path.write_text(source, encoding="utf-8", errors="replace")

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.cleanup()

    def test(self, case: Case) -> Verdict:
        """How a test ends. The program has its input, never what is expected."""
        if time.monotonic() >= self.deadline:
            return "over budget"
        if case.kind == "assert":
            ended, verdict = _tried(lambda: self._check(case))
            right = verdict == "pass\n"
        elif case.kind == "stdin":
            ended, printed = self._run([], case.given, case.expected)
            right = ended == "pass" and same_output(printed, case.expected, self.tolerance)
        else:
            request: dict[str, Any] = {"name": case.name, "args": [encode(value) for value in case.given], "kwargs": {}}
            command = [_HARNESS, "program", str(self.seconds)]
            ended, printed = self._run(command, json.dumps(request) + "\n", case.expected)
            right = ended == "pass" and same_value(_answer(printed), case.expected, self.tolerance)
        if ended == "timeout" and time.monotonic() >= self.deadline:
            return "over budget"
        return ended if ended != "pass" or right else "fail"

    def score_nothing(self, rows: Sequence[Sequence[Case]]) -> list[bool]:
        """Whether code can be scored by each row of tests of kind ``assert``, which are run without a program."""
        found: list[bool] = []
        while len(found) < len(rows):
            left = [list(map(vars, row)) for row in rows[len(found) :][:_ROWS]]
            _, printed = self._run([_HARNESS, "stub"], json.dumps(left))
            # Of tests that do not end, or end their process, nothing is known.
            found += [line == "1" for line in printed.split()] or [True]
        return found

    def _first_program(self, sources: Sequence[str]) -> int:
        """Read by another process, since the parser of Python can be brought down."""
        _, printed = self._run([_HARNESS, "parse"], json.dumps(sources))
        return int(printed) if printed else 0

    def _bounds(self, count: int = 1, expected: Any = None) -> Bounds:
        # A loaded machine may give a third of its time to a test.
        seconds = min(3 * self.seconds * count + 3, self.deadline - time.monotonic())
        most = self.policy.file_bytes
        # Python does not write an integer of 4300 digits, nor what is nested deeply.
        with contextlib.suppress(ValueError, RecursionError):
            # More than the same value takes in UTF-8, or encoded.
            most = max(most, 8 * len(repr(expected)))
        return Bounds(seconds=seconds, output_bytes=most, kept_bytes=most)

    def _run(self, script: Sequence[str], given: str, expected: Any = None) -> tuple[Verdict, str]:
        read = given.encode(errors="replace")
        return _tried(lambda: run(*self._python(script, self.path), read, self._bounds(expected=expected)))

    def _check(self, case: Case) -> Finished:
        """Tests in one process, the program in another; each one's output is the other one's input."""
        with tempfile.TemporaryDirectory(prefix="basis-rl-tests-") as folder, contextlib.ExitStack() as at_the_end:
            path = Path(folder) / "tests.json"
            path.write_text(json.dumps(vars(case)))
            to_tests, answers = os.pipe()
            to_program, requests = os.pipe()
            try:
                command = self._python([_HARNESS, "program", str(self.seconds)], self.path, case.count)
                program = start(*command, to_program, answers)
                at_the_end.callback(end, program)
                command = self._python([_HARNESS, "tests"], path, case.count)
                tester = start(*command, to_tests, requests, subprocess.PIPE)
            finally:
                for descriptor in (to_tests, answers, to_program, requests):
                    os.close(descriptor)
            assert tester.stderr is not None
            finished = follow(tester, tester.stderr, self._bounds(case.count))
            if finished.head == b"pass\n":
                return replace(finished, how="exited", returncode=0)
            if finished.how == "exited" and finished.returncode == 0:
                # The program may have ended before: how it did tells a lack of time or of a sandbox from a failure.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return replace(finished, returncode=program.wait(1.0))
            return finished

    def _python(self, script: Sequence[str], own: Path, count: int = 1) -> tuple[list[str], Policy]:
        """The command and its policy; `own` alone it may read: the tests are not the program's, nor it theirs."""
        command, readable = python(self.packages)
        packages = () if self.packages else numpy()
        readable = (*readable, *packages, str(own))
        policy = replace(self.policy, cpu_seconds=self.seconds * count, readable=readable)
        return [*command, _START, ":".join(packages), *script, str(own)], policy


def _tried(once: Callable[[], Finished]) -> tuple[Verdict, str]:
    """How a process ends and what it writes. It is tried again where the system lacks what a sandbox needs to start."""
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt / 4)
        with contextlib.suppress(OSError):
            finished = once()
            ended = _verdict(finished)
            if ended != "no sandbox":
                return ended, finished.head.decode(errors="replace")
    return "no sandbox", ""


def _verdict(finished: Finished) -> Verdict:
    """``pass`` if the process ended by itself and without an error."""
    if finished.how == "timeout" or -finished.returncode == signal.SIGXCPU:
        return "timeout"
    if finished.returncode == CANNOT_START:
        return "no sandbox"
    return "pass" if finished.how == "exited" and finished.returncode == 0 else "fail"


def _answer(printed: str) -> Any:
    try:
        answer = json.loads(printed.partition("\n")[0])
        return answer["value"]
    except (ValueError, RecursionError, KeyError, TypeError):
        # Equal to no encoded value.
        return {"nothing": None}
