"""One process of a `WorkerPool`: its pipes, its sandbox, its clock, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
_PATIENCE = 5.0
_LOOK = 0.1  # seconds in which a thread that runs is seen to: many times the kernel's tick


class WorkerProcess:
    """One process, one task in flight, its own pair of pipes. The clock starts when a task is dispatched.

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
        try:
            command, env = self._shut_in(command, policy)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
                env=env,
                start_new_session=True,  # Ctrl-C reaches the trainer, which ends the worker; the group can be killed
            )
        except BaseException:
            self._clean_up()
            raise
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.fd, self.stdin = self.process.stdout.fileno(), self.process.stdin.fileno()
        self.buffer, self.outbox = b"", b""
        self.ended = False
        os.set_blocking(self.stdin, False)  # a worker that does not read must not hold up the one who writes
        self.ready = False
        self.task: int | None = None
        self.tasks = 0
        self.began = time.monotonic()
        self.deadline = self.began + patience
        self.pid = self.process.pid
        self.bytes_at_start = 0
        self._wanted: dict[str, float] = {}

    def _shut_in(self, command: Sequence[str], policy: Policy | None) -> tuple[list[str], dict[str, str]]:
        if policy is None:
            kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            return list(command), {**kept, **_FIXED}
        self.folder = tempfile.mkdtemp(prefix="basis_rl_worker_")
        shut_in = sandboxed(command, replace(policy, folder=self.folder, temporary=True))
        return shut_in, environment(self.folder, **_FIXED)

    def dispatch(self, index: int, task: dict[str, Any], timeout: float) -> None:
        self.task, self.began = index, time.monotonic()
        self.deadline = self.began + timeout
        self.tasks += 1
        self._wanted = {thread: wanted for thread, (_, wanted) in _threads(self.pid).items()}
        self.outbox = json.dumps(task).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Send as much of the task as the pipe takes."""
        try:
            self.outbox = self.outbox[os.write(self.stdin, self.outbox) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # a dead worker is seen as end of file on its output
            self.outbox = b""

    def read(self) -> dict[str, Any] | Literal["lost"] | None:
        """One answer; ``"lost"`` if the process is gone or breaks the protocol; None if there is more to come."""
        chunk = os.read(self.fd, 1 << 16)
        self.ended = not chunk
        self.buffer += chunk
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return "lost" if not chunk or len(self.buffer) > _LONGEST_ANSWER else None
        self.buffer = b""
        try:
            answer = json.loads(line)
        except ValueError:
            return "lost"
        # An answer that nobody asked for would be taken for that to the next task.
        return answer if isinstance(answer, dict) and not rest else "lost"

    def has_started(self) -> None:
        self.ready, self.deadline = True, float("inf")
        if self.policy is not None:
            self.pid = _innermost(self.pid)
        self.bytes_at_start = resident_bytes(self.pid)

    def has_answered(self) -> None:
        self.task, self.deadline, self.outbox = None, float("inf"), b""

    def slept(self) -> bool | None:
        """Whether the process has spent most of the task's time neither computing nor waiting for a processor.

        None where this system does not tell.
        """
        threads = _threads(self.pid)
        if not threads or not self._wanted:
            return None
        if any(state in "DTt" for state, _ in threads.values()):
            return False  # one waits for a disk or memory, or has been stopped: not of its own will
        awake = {thread for thread, (state, _) in threads.items() if state == "R"}
        if awake:  # computes, or waits for a processor; the kernel counts a wait when it is over
            time.sleep(_LOOK)
            before, threads = threads, _threads(self.pid)
            if any(threads.get(thread) == before[thread] for thread in awake):
                return False
        wanted = sum(wanted - self._wanted.get(thread, 0.0) for thread, (_, wanted) in threads.items())
        return wanted < 0.5 * (time.monotonic() - self.began)

    def ask_to_end(self) -> None:
        """The first half of `close`, for many at a time."""
        # The launcher of a sandbox ends it, and takes in the dead; killed itself, it would leave them to the first
        # process of the machine, which in a container may be the trainer, and takes in nobody.
        number = signal.SIGTERM if self.policy is not None else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> int:
        """End it, and all that it has started; its return code."""
        self.ask_to_end()
        try:
            code = self.process.wait(_PATIENCE if self.policy is not None else None)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._clean_up()
        return code

    def _clean_up(self) -> None:
        self.stderr.close()
        if self.folder is not None:
            remove_folder(self.folder)

    def return_code(self) -> int | None:
        """Of a process whose output has ended; None if it is still alive."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_PATIENCE) if self.ended else None
        return None

    def last_words(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")[-2000:].strip()


def resident_bytes(pid: int) -> int:
    """Memory that a process has; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _innermost(pid: int) -> int:
    """The command itself, below the processes of the launcher."""
    for _ in range(2):
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            break
        if not children:
            break
        pid = int(children[0])
    return pid


def _threads(pid: int) -> dict[str, tuple[str, float]]:
    """State of each thread of a process, one letter, and the seconds that it has computed or waited for a processor.

    Empty where the system does not tell.
    """
    found: dict[str, tuple[str, float]] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            place = Path(f"/proc/{pid}/task/{thread}")
            with contextlib.suppress(OSError, IndexError, ValueError):  # has ended meanwhile
                state = (place / "stat").read_text().rpartition(")")[2].split()[0]
                # After the state: what a thread waited before it fell asleep is in the account by then.
                computed, waited, _ = (place / "schedstat").read_text().split()
                found[thread] = state, (int(computed) + int(waited)) / 1e9
    return found
