"""Python that a model wrote, run in a sandbox, many programs at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
import weakref
from concurrent.futures import Future
from multiprocessing.pool import ThreadPool
from pathlib import Path

from basis_rl.sandbox import Policy, isolation, python_paths, remove_folder
from basis_rl.sandbox.run import Bounds, Finished, fair_share, run
from basis_rl.tools.base import ToolBroken, ToolResult

_MARK = b"\x02begun\x03"
_RUNNER = Path(__file__).with_name("runner.py").read_text()
_ATTEMPTS = 3
_MOST_CODE = 200_000
_MOST_OUTPUT = 4 << 20
_MOST_FILES = 64 << 20


class PythonTool:
    """Runs each program in a process and a temporary folder of its own, and answers with what it prints.

    Nothing of a call is left for the next, as with the code runners of tool-integrated reasoning (Sandbox Fusion, which
    OTB's App. F.1 names). The value of the last line is printed too, as in a console; a traceback or a limit that was
    passed is text for the model. The isolation is `basis_rl.sandbox`'s (docs/security.md).

    Args:
        timeout: seconds of wall time and of CPU time that a program may take, the interpreter's start aside.
        memory_mb: of address space per process.
        max_chars: of the answer; what is longer loses its middle.
        num_workers: programs at a time, on this rank; default: the machine's cores, shared among its ranks.
        processes: threads and processes that a program may have at a time.
        require_isolation: refuse to run where the kernel does not give all of it. False runs with what there is: only
            for code that you would run yourself.

    Raises:
        ValueError: a parameter out of its range, or isolation is missing.
    """

    __name__ = "python"

    def __init__(
        self,
        timeout: float = 10.0,
        memory_mb: int = 1024,
        max_chars: int = 2000,
        num_workers: int | None = None,
        processes: int = 32,
        require_isolation: bool = True,
    ) -> None:
        workers = num_workers if num_workers is not None else fair_share()
        if timeout <= 0 or memory_mb < 64 or max_chars < 100 or workers < 1 or processes < 1:
            raise ValueError(
                "PythonTool needs timeout > 0, memory_mb >= 64, max_chars >= 100, num_workers >= 1 and processes >= 1, "
                f"got {timeout}, {memory_mb}, {max_chars}, {workers}, {processes}."
            )
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.max_chars = max_chars
        self.processes = processes
        self._readable = python_paths(own_modules=False)
        self._bounds = Bounds(seconds=timeout, output_bytes=_MOST_OUTPUT, kept_bytes=4 * max_chars, mark=_MARK)
        self.isolation = isolation()
        if require_isolation and not self.isolation.complete:
            raise ValueError(
                f"The tool 'python' runs programs that a model wrote, and this machine does not isolate them: "
                f"{self.isolation}. Run where the kernel has Landlock, seccomp and user namespaces (a container may "
                "have to be allowed them), or, if you would run such programs yourself, set require_isolation to false "
                "(tool_kwargs: {python: {require_isolation: false}})."
            )
        # Not a ThreadPoolExecutor, which at the end of the interpreter first finishes all programs that were submitted.
        self._threads = ThreadPool(workers)
        weakref.finalize(self, self._threads.terminate)

    def __call__(self, code: str) -> str:
        """Run a Python program and see what it prints, and the value of its last line. Nothing is kept between runs.

        Args:
            code: The whole program.

        Returns:
            What it printed, or the error.
        """
        return self.run(code).text

    def start(self, code: str) -> Future[ToolResult]:
        """Begin to run a program, as soon as one of the workers is free.

        Raises:
            TypeError: the code is not text.
        """
        if not isinstance(code, str):
            raise TypeError(f"code must be text, got {type(code).__name__}")
        answer: Future[ToolResult] = Future()
        self._threads.apply_async(self.run, (code,), callback=answer.set_result, error_callback=answer.set_exception)
        return answer

    def run(self, code: str) -> ToolResult:
        """Run a program and wait for it.

        Raises:
            ToolBroken: the sandbox did not start, three times.
        """
        if len(code) > _MOST_CODE:
            return ToolResult(
                f"Error: the program has {len(code)} characters; at most {_MOST_CODE} are allowed.", failed=True
            )
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt)
            try:
                finished = self._attempt(code)
            except OSError as error:
                why = str(error)
                continue
            if finished.begun:
                return self._answer(finished)
            why = finished.head.decode(errors="replace")[-500:]
        raise ToolBroken(f"The sandbox of the Python tool does not start: {why}")

    def _attempt(self, code: str) -> Finished:
        folder = tempfile.mkdtemp(prefix="python-tool-")
        try:
            policy = Policy(
                memory_bytes=self.memory_mb << 20,
                cpu_seconds=self.timeout + 1,
                file_bytes=_MOST_FILES,
                processes=self.processes,
                folder=folder,
                readable=self._readable,
                folder_bytes=_MOST_FILES,
                temporary=True,
            )
            command = [sys.executable, "-I", "-c", _RUNNER, _MARK.decode()]
            return run(command, policy, code.encode("utf-8", "replace"), self._bounds, subprocess.STDOUT)
        finally:
            remove_folder(folder)

    def _answer(self, finished: Finished) -> ToolResult:
        text = _text(finished).strip("\n")
        problem = None
        if finished.how == "timeout" or -finished.returncode == signal.SIGXCPU:
            problem = f"Error: stopped after {self.timeout:g} s."
        elif finished.how == "output":
            problem = f"Error: stopped, since it had printed more than {_MOST_OUTPUT >> 20} MB."
        elif finished.returncode < 0:
            problem = f"Error: killed by {signal.Signals(-finished.returncode).name}."
        elif finished.returncode > 0 and not text:
            problem = f"Error: ended with exit code {finished.returncode}."
        text = shortened(text, self.max_chars)
        shown = "\n".join(part for part in (text, problem) if part)
        return ToolResult(shown or "(nothing was printed)", failed=problem is not None or finished.returncode != 0)


def _text(finished: Finished) -> str:
    left_out = finished.written - len(finished.head) - len(finished.tail)
    middle = f"\n... {left_out} bytes left out ...\n".encode() if left_out else b""
    return (finished.head + middle + finished.tail).decode("utf-8", "replace")


def shortened(text: str, most: int) -> str:
    """At most about `most` characters: the two ends, and how much is left out between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
