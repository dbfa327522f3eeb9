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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from basis_rl.sandbox import Policy, environment, remove_folder, sandboxed

# Sets are walked in the same order by every worker: a verdict must not depend on which of them gave it.
_FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_LONGEST_ANSWER = 1 << 22
# Struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("3i")
PATIENCE = 5.0
# Seconds in which a thread that runs is seen to: many times the kernel's tick.
_LOOK = 0.1


class Worker:
    """One process that answers tasks, in turn.

    It leads a session of its own, with a socket as its standard input and output; with a policy it is in a sandbox,
    with a temporary folder.

    Args:
        command: how to start it.
        policy: what it may do, in a temporary folder of its own; None: no sandbox.
        patience: seconds until it must be ready.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], policy: Policy | None, patience: float) -> None:
        self.policy = policy
        self.folder: str | None = None
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._socket, theirs = socket.socketpair()
        try:
            if hasattr(socket, "SO_PASSCRED"):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            # A worker that does not read must not hold up the one who writes.
            self._socket.setblocking(False)
            command, env = self._shut_in(command)
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self.stderr,
                env=env,
                # Ctrl-C reaches the trainer, which ends the worker; the group can be killed.
                start_new_session=True,
            )
        except BaseException:
            self._clean_up()
            raise
        finally:
            theirs.close()
        self.fd = self._socket.fileno()
        # Known when the worker is ready, where the system tells.
        self.pid: int | None = None
        self.buffer = b""
        self.outbox = b""
        self.ended = False
        self.ready = False
        # The one that it is at work on.
        self.task: int | None = None
        self.tasks = 0
        self.began = time.monotonic()
        self.deadline = self.began + patience
        self.bytes_at_start = 0
        self._wanted: dict[str, float] = {}

    def _shut_in(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        if self.policy is None:
            kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            return list(command), {**kept, **_FIXED}
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
        """The answer, None if there is more to come; ``"lost"`` if the process is gone or breaks the protocol."""
        chunk = self._receive()
        if chunk is None:
            return None
        self.ended = not chunk
        line, newline, more = (self.buffer + chunk).partition(b"\n")
        # More than one answer would be taken for that to the next task.
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
        """What is there; None if nothing is, empty at the end."""
        try:
            if self.ready:
                return self._socket.recv(1 << 16)
            chunk, messages, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""
        for _, kind, data in messages:
            # The kernel names the sender by the number that it has here, also out of a namespace.
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
            # One waits for a disk or memory, or has been stopped: not of its own will.
            return False
        awake = {thread for thread, (state, _) in threads.items() if state == "R"}
        # computes, or waits for a processor; the kernel counts a wait when it is over.
        if awake:
            time.sleep(_LOOK)
            before = threads
            threads = _threads(self.pid)
            if any(threads.get(thread) == before[thread] for thread in awake):
                return False
        wanted = sum(wanted - self._wanted.get(thread, 0.0) for thread, (_, wanted) in threads.items())
        return wanted < 0.5 * (time.monotonic() - self.began)

    def ask_to_end(self) -> None:
        """The first half of `close`, for many at a time."""
        # The launcher of a sandbox ends it, and takes in the dead; killed itself, it would leave them to the first
        # process of the machine, which in a container may be the trainer, and takes in nobody.
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
        """Of a process whose output has ended; None if it is still alive."""
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
            # Has ended meanwhile.
            with contextlib.suppress(OSError, IndexError, ValueError):
                state = (place / "stat").read_text().rpartition(")")[2].split()[0]
                # After the state: what a thread waited before it fell asleep is in the account by then.
                computed, waited, _ = (place / "schedstat").read_text().split()
                found[thread] = state, (int(computed) + int(waited)) / 1e9
    return found
