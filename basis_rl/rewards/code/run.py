"""One program, one test: run in a sandbox of its own, ended in time, judged from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from basis_rl.rewards.code.harness import dump, encode
from basis_rl.rewards.code.tests import Case, same_output, same_value
from basis_rl.sandbox import Policy
from basis_rl.sandbox.launch import CANNOT_START
from basis_rl.sandbox.run import Bounds, Finished, end, follow, run, start

Verdict = Literal["pass", "fail", "timeout", "unsupported", "no sandbox"]
_HARNESS = str(Path(__file__).with_name("harness.py"))
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
           "/usr/share/zoneinfo")  # fmt: skip


@lru_cache(maxsize=2)
def python(packages: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The interpreter's command, and all that it reads: no data set is in it, nor the working directory."""
    real = os.path.realpath(sys.executable)
    base = {"base": sys.base_prefix, "installed_base": sys.base_prefix, "platbase": sys.base_prefix}
    readable = [real, *(sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib"))]
    readable += [os.path.join(sys.base_prefix, "lib"), *_SYSTEM, _HARNESS]
    if packages:
        readable += [sys.prefix, *(sysconfig.get_path(name) for name in ("purelib", "platlib"))]
    kept = tuple(dict.fromkeys(path for path in readable if path and os.path.exists(path)))
    flags = ("-I", "-B", "-X", "utf8")
    return ((sys.executable, *flags) if packages else (real, *flags, "-S")), kept


class Program:
    """The code of one rollout, in a folder of its own for as long as the context lasts.

    Args:
        source: the code.
        policy: what it may do for one test, beside reading itself and the interpreter. Its `file_bytes` bound the
            output too.
        packages: whether it may import what is installed here besides the standard library.
        tolerance: see `same_output`.
    """

    def __init__(self, source: str, policy: Policy, packages: bool, tolerance: float) -> None:
        assert policy.cpu_seconds is not None
        self.policy = policy
        self.packages = packages
        self.tolerance = tolerance
        # A loaded machine may give a third of its time to a test.
        seconds = 3 * policy.cpu_seconds + 3
        self._bounds = Bounds(seconds=seconds, output_bytes=policy.file_bytes, kept_bytes=policy.file_bytes)
        self._folder = tempfile.TemporaryDirectory(prefix="basis-rl-code-")
        self.path = Path(self._folder.name) / "main.py"
        self.path.write_text(source, encoding="utf-8", errors="replace")

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.cleanup()

    def test(self, case: Case) -> Verdict:
        """How a test ends. The program has its input, never what is expected."""
        if case.kind == "assert":
            return self._check({"source": case.given, "entry_point": case.name})
        if case.kind == "stdin":
            ended, printed = self._run([str(self.path)], case.given)
            right = ended == "pass" and same_output(printed, case.expected, self.tolerance)
        else:
            request: dict[str, Any] = {"name": case.name, "args": [encode(value) for value in case.given], "kwargs": {}}
            ended, printed = self._run([_HARNESS, "program", str(self.path)], dump(request))
            right = ended == "pass" and same_value(_answer(printed), case.expected, self.tolerance)
        return ended if ended != "pass" or right else "fail"

    def _run(self, arguments: Sequence[str], given: str) -> tuple[Verdict, str]:
        finished = run(*self._python(arguments, self.path), given.encode(errors="replace"), self._bounds)
        return _verdict(finished), finished.head.decode(errors="replace")

    def _check(self, tests: dict[str, Any]) -> Verdict:
        """Tests in one process, the program in another; each one's output is the other one's input."""
        with tempfile.TemporaryDirectory(prefix="basis-rl-tests-") as folder, contextlib.ExitStack() as at_the_end:
            path = Path(folder) / "tests.json"
            path.write_text(json.dumps(tests))
            to_tests, answers = os.pipe()
            to_program, requests = os.pipe()
            try:
                command = self._python([_HARNESS, "program", str(self.path)], self.path)
                at_the_end.callback(end, start(*command, to_program, answers))
                command = self._python([_HARNESS, "tests", str(path)], path)
                tester = start(*command, to_tests, requests, subprocess.PIPE)
            finally:
                for descriptor in (to_tests, answers, to_program, requests):
                    os.close(descriptor)
            assert tester.stderr is not None
            finished = follow(tester, tester.stderr, self._bounds)
        if finished.head in (b"pass\n", b"fail\n", b"unsupported\n"):
            return finished.head.decode().strip()  # type: ignore[return-value]
        ended = _verdict(finished)
        return "fail" if ended == "pass" else ended

    def _python(self, arguments: Sequence[str], own: Path) -> tuple[list[str], Policy]:
        """The command and its policy; `own` alone it may read: the tests are not the program's, nor it theirs."""
        command, readable = python(self.packages)
        return [*command, *arguments], replace(self.policy, readable=(*readable, str(own)))


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
        return {"nothing": None}
