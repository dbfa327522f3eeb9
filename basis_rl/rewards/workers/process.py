"""One process of a `WorkerPool`: its socket, its sandbox, its clock, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from basis_rl.sandbox import Policy, environment, remove_folder, sandboxed

# A fixed hash seed: every worker must walk sets in the same order, or a verdict would depend on the worker that gave
# it.
_FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
# Bytes: a worker that sends more breaks the protocol, and could fill the trainer's memory.
_LONGEST_ANSWER = 1 << 22
# Struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("3i")
# Seconds for a process to exit after it was asked to.
PATIENCE = 5.0
# Seconds between two looks at a thread: many of the kernel's ticks, in which a running thread's CPU time must have
# grown.
_LOOK = 0.1


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
            if hasattr(socket, "SO_PASSCRED"):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            # Non-blocking: a worker that does not read must not block the trainer's write.
            self._socket.setblocking(False)
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
        # Its first message has it, on systems that pass credentials with a message; else None.
        self.pid: int | None = None
        self.buffer = b""
        self.outbox = b""
        self.ended = False
        self.ready = False
        # The number of the task that it is working on.
        self.task: int | None = None
        self.tasks = 0
        self.began = time.monotonic()
        self.deadline = self.began + patience
        self.bytes_at_start = 0
        self._wanted: dict[str, float] = {}

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
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self._wanted = {thread: wanted for thread, (_, wanted) in _threads(self.pid).items()}
        self.outbox = json.dumps(task).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Send as much of the tasks as the pipe takes."""
        try:
            self.outbox = self.outbox[self._socket.send(self.outbox) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            # A dead worker is seen as end of file on its output.
            self.outbox = b""

    def read(self) -> dict[str, Any] | Literal["lost"] | None:
        """The answer; None if it is not complete yet; ``"lost"`` if the process is gone or breaks the protocol."""
        chunk = self._receive()
        if chunk is None:
            return None
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

    def _receive(self) -> bytes | None:
        """The bytes that have arrived; None if there are none yet, empty at end of file."""
        try:
            if self.ready:
                return self._socket.recv(1 << 16)
            chunk, messages, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""
        for _, kind, data in messages:
            # The kernel translates the sender's PID out of its namespace into ours.
            if kind == getattr(socket, "SCM_CREDENTIALS", None) and chunk:
                self.pid = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0] or None
        return chunk

    def has_started(self) -> None:
        self.ready = True
        self.deadline = float("inf")
        self.bytes_at_start = resident_bytes(self.pid)

    def has_answered(self) -> int:
        """The number of the task."""
        done = self.task
        self.task = None
        assert done is not None
        self.deadline = float("inf")
        self.outbox = b""
        return done

    def slept(self) -> bool | None:
        """Whether the process has spent most of the task's time neither computing nor waiting for a processor.

        None where this system does not tell.
        """
        threads = _threads(self.pid)
        if not threads or not self._wanted:
            return None
        if any(state in "DTt" for state, _ in threads.values()):
            # A thread that waits for disk or memory (D) or was stopped (T, t) does not sleep of its own accord.
            return False
        awake = {thread for thread, (state, _) in threads.items() if state == "R"}
        # It computes, or waits for a processor. The kernel accounts for such a wait only when it is over, so look a
        # second time.
        if awake:
            time.sleep(_LOOK)
            before = threads
            threads = _threads(self.pid)
            if any(threads.get(thread) == before[thread] for thread in awake):
                return False
        wanted = sum(wanted - self._wanted.get(thread, 0.0) for thread, (_, wanted) in threads.items())
        return wanted < 0.5 * (time.monotonic() - self.began)

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


def resident_bytes(pid: int | None) -> int:
    """Memory that a process has; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _threads(pid: int | None) -> dict[str, tuple[str, float]]:
    """State of each thread of a process, one letter, and the seconds that it has computed or waited for a processor.

    Empty where the system does not tell.
    """
    found: dict[str, tuple[str, float]] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            place = Path(f"/proc/{pid}/task/{thread}")
            # A thread may end between the two reads.
            with contextlib.suppress(OSError, IndexError, ValueError):
                state = (place / "stat").read_text().rpartition(")")[2].split()[0]
                # Read after the state: if the thread sleeps, the account already holds all that it waited before.
                computed, waited, _ = (place / "schedstat").read_text().split()
                found[thread] = state, (int(computed) + int(waited)) / 1e9
    return found
