"""One process of a `WorkerPool`: its pipes, its sandbox, its clock, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from basis_rl.sandbox import Policy, environment, remove_folder, sandboxed

# Sets are walked in the same order by every worker: a verdict must not depend on which of them gave it.
_FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_LONGEST_ANSWER = 1 << 22
PATIENCE = 5.0
MARK = "#"
"""The key under which a task of several has its number, and its answer again."""
_LOOK = 0.1  # seconds in which a thread that runs is seen to: many times the kernel's tick


class Started:
    """A process that was started, in a session of its own; with a policy in a sandbox and a temporary folder.

    Args:
        command: how to start it.
        policy: what it may do, in a temporary folder of its own; None: no sandbox.
        end: of a socket, which is its standard input; it has no standard output then. None: two pipes.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], policy: Policy | None, end: socket.socket | None = None) -> None:
        self.policy = policy
        self.folder: str | None = None
        self._said = ""
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        try:
            command, env = self._shut_in(command, policy)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if end is None else end.fileno(),
                stdout=subprocess.PIPE if end is None else subprocess.DEVNULL,
                stderr=self.stderr,
                env=env,
                start_new_session=True,  # Ctrl-C reaches the trainer, which ends the worker; the group can be killed
            )
        except BaseException:
            self._clean_up()
            raise

    def _shut_in(self, command: Sequence[str], policy: Policy | None) -> tuple[list[str], dict[str, str]]:
        if policy is None:
            kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            return list(command), {**kept, **_FIXED}
        self.folder = tempfile.mkdtemp(prefix="basis_rl_worker_")
        shut_in = sandboxed(command, replace(policy, folder=self.folder, temporary=True))
        return shut_in, environment(self.folder, **_FIXED)

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
            code = self.process.wait(PATIENCE if self.policy is not None else None)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        self._clean_up()
        return code

    def _clean_up(self) -> None:
        self.last_words()
        process = getattr(self, "process", None)  # None: it could not be started
        for file in (self.stderr, *((process.stdin, process.stdout) if process else ())):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()
        if self.folder is not None:
            remove_folder(self.folder)

    def last_words(self) -> str:
        """What it has written to the standard error, also after `close`: workers outlive their zygote's replacement."""
        if not self.stderr.closed:
            self.stderr.seek(0)
            self._said = self.stderr.read().decode(errors="replace")[-2000:].strip()
        return self._said


class Worker(ABC):
    """One process that answers tasks, in turn. The clock of a task starts when those before it are answered.

    Args:
        fd: where its answers come from.
        stdin: where its tasks go.
        patience: seconds until it must be ready.
    """

    process: Any
    pid: int | None
    """None until it is known: where the process is forked by another one, when it is ready."""

    def __init__(self, fd: int, stdin: int, patience: float) -> None:
        self.fd, self.stdin = fd, stdin
        self.buffer, self.outbox = b"", b""
        self.ended = False
        os.set_blocking(self.stdin, False)  # a worker that does not read must not hold up the one who writes
        self.ready = False
        self.in_flight: deque[int] = deque()
        self.tasks = 0
        self.next_look = 9
        self.began = time.monotonic()
        self.deadline = self.began + patience
        self.pid = None
        self.bytes_at_start = 0
        self._wanted: dict[str, float] = {}
        self._timeout = 0.0
        self._marked = False

    @property
    def task(self) -> int | None:
        """The one that it is at work on."""
        return self.in_flight[0] if self.in_flight else None

    def dispatch(self, tasks: Mapping[int, dict[str, Any]], timeout: float) -> None:
        """Send tasks by their numbers, each of which has `timeout` seconds. The numbers distinguish them."""
        marks = {index: {MARK: index} if len(tasks) > 1 else {} for index in tasks}
        self.in_flight.extend(tasks)
        self.tasks += len(tasks)
        self._timeout = timeout
        self._start_clock()
        self.outbox = b"".join(json.dumps({**task, **marks[i]}).encode() + b"\n" for i, task in tasks.items())
        self._marked = len(tasks) > 1
        self.write()

    def _start_clock(self) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + self._timeout
        self._wanted = {thread: wanted for thread, (_, wanted) in _threads(self.pid).items()}

    def write(self) -> None:
        """Send as much of the tasks as the pipe takes."""
        try:
            self.outbox = self.outbox[os.write(self.stdin, self.outbox) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # a dead worker is seen as end of file on its output
            self.outbox = b""

    def read(self) -> list[dict[str, Any]] | Literal["lost"]:
        """The answers that are there, none if there is more to come; ``"lost"`` if the process is gone or breaks the
        protocol.
        """
        chunk = self._receive()
        self.ended = not chunk
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        if len(self.buffer) > _LONGEST_ANSWER:
            return "lost"
        answers: list[dict[str, Any]] = []
        for line in lines:
            try:
                answer = json.loads(line)
            except ValueError:
                return "lost"
            if not isinstance(answer, dict):
                return "lost"
            answers.append(answer)
        return answers if chunk and self._were_asked_for(answers) else "lost"

    def _were_asked_for(self, answers: list[dict[str, Any]]) -> bool:
        """An unexpected answer would be taken for that to the next task."""
        if not self._marked:
            return not answers or (len(answers) == 1 and not self.buffer)
        expected = list(self.in_flight)[: len(answers)]
        return [answer.pop(MARK, None) for answer in answers] == expected

    def _receive(self) -> bytes:
        try:
            return os.read(self.fd, 1 << 16)
        except ConnectionResetError:
            return b""

    def has_started(self) -> None:
        self.ready, self.deadline = True, float("inf")
        self.bytes_at_start = resident_bytes(self.pid)

    def has_answered(self) -> int:
        """One task, whose number it is."""
        done = self.in_flight.popleft()
        if self.in_flight:
            self._start_clock()
        else:
            self.deadline, self.outbox = float("inf"), b""
        return done

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

    @abstractmethod
    def ask_to_end(self) -> None:
        """The first half of `close`, for many at a time."""

    @abstractmethod
    def close(self) -> int | None:
        """End it; its return code."""

    @abstractmethod
    def return_code(self) -> int | None:
        """Of a process whose output has ended; None if it is still alive."""

    @abstractmethod
    def last_words(self) -> str:
        """What it, or who started it, has written to the standard error."""


class WorkerProcess(Worker):
    """A worker that was started by itself, with its own pair of pipes.

    Args:
        command: how to start it.
        policy: what it may do, in a temporary folder of its own; None: no sandbox.
        patience: seconds until it must be ready.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], policy: Policy | None, patience: float) -> None:
        self.started = Started(command, policy)
        self.process = self.started.process
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        super().__init__(self.process.stdout.fileno(), self.process.stdin.fileno(), patience)
        self.pid = self.process.pid

    def has_started(self) -> None:
        if self.started.policy is not None:
            self.pid = _innermost(self.process.pid)
        super().has_started()

    def ask_to_end(self) -> None:
        self.started.ask_to_end()

    def close(self) -> int:
        """End it, and all that it has started; its return code."""
        return self.started.close()

    def return_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(PATIENCE) if self.ended else None
        return None

    def last_words(self) -> str:
        return self.started.last_words()


def resident_bytes(pid: int | None) -> int:
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


def _threads(pid: int | None) -> dict[str, tuple[str, float]]:
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
