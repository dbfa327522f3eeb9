"""One program, one test: started in a sandbox of its own, ended in time, judged from outside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal

from basis_rl.rewards.code.tests import Case, same_output, same_value
from basis_rl.rewards.code.values import dump, encode
from basis_rl.sandbox import Policy, environment, sandboxed

Verdict = Literal["pass", "fail", "timeout", "unsupported", "no sandbox"]
_HERE = Path(__file__).parent
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
           "/usr/share/zoneinfo")  # fmt: skip
_OUTPUT_BYTES = 4 << 20
_CANNOT_START = 126


@dataclass(frozen=True)
class Limits:
    """What a program may take for one test.

    Attributes:
        seconds: CPU time; by the clock it may take three times that and 3 s more.
        memory_bytes: address space.
        processes: processes and threads.
        packages: whether it may import what is installed here besides the standard library.
        tolerance: see `same_output`.
    """

    seconds: float
    memory_bytes: int
    processes: int
    packages: bool
    tolerance: float


@lru_cache(maxsize=2)
def python(packages: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The interpreter's command, and all that it reads: no data set is in it, nor the working directory."""
    real = os.path.realpath(sys.executable)
    base = {"base": sys.base_prefix, "installed_base": sys.base_prefix, "platbase": sys.base_prefix}
    readable = [real, *(sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib"))]
    readable += [os.path.join(sys.base_prefix, "lib"), *_SYSTEM, str(_HERE)]
    if packages:
        readable += [sys.prefix, *(sysconfig.get_path(name) for name in ("purelib", "platlib"))]
    kept = tuple(dict.fromkeys(path for path in readable if path and os.path.exists(path)))
    flags = ("-I", "-B", "-X", "utf8")
    return ((sys.executable, *flags) if packages else (real, *flags, "-S")), kept


class Program:
    """The code of one completion, in a folder of its own for as long as the context lasts."""

    def __init__(self, source: str, limits: Limits) -> None:
        self.limits = limits
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
            right = ended == "pass" and same_output(printed, case.expected, self.limits.tolerance)
        else:
            request: dict[str, Any] = {"name": case.name, "args": [encode(value) for value in case.given], "kwargs": {}}
            ended, printed = self._run([str(_HERE / "driver.py"), str(self.path)], dump(request))
            right = ended == "pass" and same_value(_answer(printed), case.expected, self.limits.tolerance)
        return ended if ended != "pass" or right else "fail"

    def _run(self, arguments: Sequence[str], given: str) -> tuple[Verdict, str]:
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
            stdin.write(given.encode(errors="replace"))
            stdin.seek(0)
            ended = self._wait([self._start(arguments, stdin, stdout)])
            stdout.seek(0)
            return ended, stdout.read(_OUTPUT_BYTES).decode(errors="replace")

    def _check(self, tests: dict[str, Any]) -> Verdict:
        """Tests in one process, the program in another; each one's output is the other one's input."""
        with tempfile.TemporaryDirectory(prefix="basis-rl-tests-") as folder, tempfile.TemporaryFile() as said:
            path = Path(folder) / "tests.json"
            path.write_text(json.dumps(tests))
            to_tests, answers = os.pipe()
            to_program, requests = os.pipe()
            try:
                program = self._start([str(_HERE / "driver.py"), str(self.path)], to_program, answers)
                tester = self._start([str(_HERE / "tester.py"), str(path)], to_tests, requests, said, str(path))
            finally:
                for descriptor in (to_tests, answers, to_program, requests):
                    os.close(descriptor)
            ended = self._wait([tester, program])
            said.seek(0)
            verdict = said.read(64)
        if verdict in (b"pass\n", b"fail\n", b"unsupported\n"):
            return verdict.decode().strip()  # type: ignore[return-value]
        return "fail" if ended == "pass" else ended

    def _start(
        self, arguments: Sequence[str], stdin: IO[bytes] | int, stdout: IO[bytes] | int,
        stderr: IO[bytes] | int = subprocess.DEVNULL, *more: str,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        command, readable = python(self.limits.packages)
        own = more or (str(self.path),)  # the tests are not the program's to read, and the other way round
        policy = Policy(
            memory_bytes=self.limits.memory_bytes,
            cpu_seconds=self.limits.seconds,
            file_bytes=_OUTPUT_BYTES,
            processes=self.limits.processes,
            folder=None,
            readable=(*readable, *own),
        )
        return subprocess.Popen(
            sandboxed([*command, *arguments], policy),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment(None, PYTHONIOENCODING="utf-8"),
            start_new_session=True,
        )

    def _wait(self, processes: Sequence[subprocess.Popen[bytes]]) -> Verdict:
        """Until the first one ends: ``pass`` if it ended by itself and without an error. Then all are ended."""
        in_time = _ends(processes[0], 3 * self.limits.seconds + 3)
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not in_time:
            return "timeout"
        code = processes[0].returncode
        if code == _CANNOT_START:
            return "no sandbox"
        return "pass" if code == 0 else "timeout" if -code == signal.SIGXCPU else "fail"


def _answer(printed: str) -> Any:
    try:
        answer = json.loads(printed.partition("\n")[0])
        return answer["value"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {"nothing": None}


def _ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends in time. `Popen.wait` with a timeout looks 20 times a second, which would be half of the time."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # no Linux
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.poll() is not None
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
