"""One process of a `WorkerPool`: its socket, its sandbox, its clock, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from basis_rl.sandbox import Policy, environment, remove_folder, sandboxed

# A fixed hash seed: every worker must walk sets in the same order, or a verdict would depend on the worker that gave
# it.
_FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
# Bytes: a worker that sends more breaks the protocol, and could fill the trainer's memory.
_LONGEST_ANSWER = 1 << 22
# Seconds for a process to exit after it was asked to, or to read a task.
PATIENCE = 5.0


class Worker:
    """One process that answers tasks, in turn.

    It leads a session of its own, with a socket as its standard input and output; with a policy it is in a sandbox,
    with a temporary folder.

    Args:
        command: how to start it.
        policy: what it may do, in a temporary folder of its own; None: no sandbox.
        patience: seconds until it must be ready.
        env: further variables that it has, if it is in no sandbox.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], policy: Policy | None, patience: float, env: Mapping[str, str] | None = None
    ) -> None:
        self.policy = policy
        self._env = dict(env or {})
        self.folder: str | None = None
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._socket, theirs = socket.socketpair()
        try:
            command, env = self._shut_in(command)
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self.stderr,
                env=env,
                # Ctrl-C then reaches only the trainer, which ends the worker with its whole process group.
                start_new_session=True,
            )
        except BaseException:
            self._clean_up()
            raise
        finally:
            theirs.close()
        self.fd = self._socket.fileno()
        self.buffer = b""
        self.ended = False
        self.ready = False
        # The number of the task that it is working on.
        self.task: int | None = None
        self.tasks = 0
        self.deadline = time.monotonic() + patience

    def _shut_in(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        if self.policy is None:
            kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            return list(command), {**kept, **self._env, **_FIXED}
        self.folder = tempfile.mkdtemp(prefix="basis_rl_worker_")
        shut_in = sandboxed(command, replace(self.policy, folder=self.folder, temporary=True))
        return shut_in, environment(self.folder, **_FIXED)

    def dispatch(self, number: int, task: dict[str, Any], timeout: float) -> None:
        """Send a task, which has `timeout` seconds."""
        self.task = number
        self.tasks += 1
        self.deadline = time.monotonic() + timeout
        # One that is dead, or does not read, is noticed by its output or at its deadline.
        self._socket.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(task).encode() + b"\n")

    def read(self) -> dict[str, Any] | Literal["lost"] | None:
        """The answer, once there is something to read; None if it is not complete; ``"lost"`` if the process is gone or
        breaks the protocol."""
        try:
            chunk = self._socket.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        self.ended = not chunk
        line, newline, more = (self.buffer + chunk).partition(b"\n")
        # What follows the answer would be taken for the answer to the next task.
        if not chunk or more or len(line) > _LONGEST_ANSWER:
            return "lost"
        if not newline:
            self.buffer = line
            return None
        self.buffer = b""
        try:
            answer = json.loads(line)
        except ValueError:
            return "lost"
        return answer if isinstance(answer, dict) else "lost"

    def has_started(self) -> None:
        self.ready = True
        self.deadline = float("inf")

    def has_answered(self) -> int:
        """The number of the task."""
        done = self.task
        self.task = None
        assert done is not None
        self.deadline = float("inf")
        return done

    def ask_to_end(self) -> None:
        """Send the signal that ends it, and do not wait, so that many workers can end at the same time."""
        # In a sandbox, SIGTERM makes the launcher end and reap its processes. If the launcher were killed, PID 1 would
        # inherit them, which in a container may be the trainer, and that reaps nobody.
        self._signal(signal.SIGKILL if self.policy is None else signal.SIGTERM)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End it, and all that it has started."""
        self.ask_to_end()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()
        self._clean_up()

    def _clean_up(self) -> None:
        self._socket.close()
        self.stderr.close()
        if self.folder is not None:
            remove_folder(self.folder)

    def return_code(self) -> int | None:
        """The exit code, if its output has ended and it exits within `PATIENCE` seconds; else None."""
        if self.ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(PATIENCE)
        return None

    def last_words(self) -> str:
        """What it has written to the standard error."""
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")[-2000:].strip()
