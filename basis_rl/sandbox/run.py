"""One bounded, killable, isolated process: started in a sandbox, followed, and ended with all of its group."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Literal

from basis_rl.sandbox.kernel import pidfd
from basis_rl.sandbox.policy import Policy, environment, sandboxed

_CHUNK = 1 << 16
# Between looks whether the process has ended, where there is no pidfd to tell it.
_LOOK_SECONDS = 0.05

Ending = Literal["exited", "timeout", "output"]
Stream = IO[bytes] | int


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a process may take, beside its policy.

    Attributes:
        seconds: wall-clock time, from when it has written `mark`.
        output_bytes: it is killed when it writes more.
        kept_bytes: of the beginning and of the end of the output, each; the rest is read and forgotten.
        mark: bytes that the command writes first, when its own start is over; not part of the output. Empty: the clock
            starts with the process.
        start_seconds: until `mark`, where there is one.
    """

    seconds: float
    output_bytes: int
    kept_bytes: int
    mark: bytes = b""
    start_seconds: float = 60.0


@dataclass(frozen=True)
class Finished:
    """How a process ended.

    Attributes:
        how: it exited (or was killed by others), its time was over, or it wrote too much.
        begun: it wrote the mark.
        returncode: as in `subprocess`; of no meaning where it was killed here.
        head: the beginning of its output.
        tail: the end of it, where it is not in the head.
        written: bytes of output, as far as they were read.
    """

    how: Ending
    begun: bool
    returncode: int
    head: bytes
    tail: bytes
    written: int


def run(
    command: Sequence[str], policy: Policy, given: bytes, bounds: Bounds, stderr: Stream = subprocess.DEVNULL
) -> Finished:
    """Run a command with `given` as its standard input, wait for it, and keep the ends of its output.

    Args:
        command: as `sandboxed` takes it.
        policy: what it may do.
        given: its standard input, a file.
        bounds: its time and output.
        stderr: `subprocess.STDOUT` for errors as a part of the output.

    Raises:
        OSError: it cannot be started.
    """
    with tempfile.TemporaryFile() as file:
        file.write(given)
        file.seek(0)
        process = start(command, policy, file, subprocess.PIPE, stderr)
    assert process.stdout is not None
    return follow(process, process.stdout, bounds)


def fair_share() -> int:
    """Processes at a time on this rank: the cores, shared among the ranks of this machine, at least 2."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def start(
    command: Sequence[str], policy: Policy, stdin: Stream, stdout: Stream, stderr: Stream = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a command under `policy`, in a session of its own; the caller has to `end` it.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        sandboxed(command, policy),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment(policy.folder),
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes]) -> int:
    """Kill a process with its group, unless its end is known already, and wait for it; its return code."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Before it is reaped: its number is not another's yet.
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def follow(process: subprocess.Popen[bytes], stream: IO[bytes], bounds: Bounds) -> Finished:
    """Read `stream`, a pipe that the process writes to, until the process or a bound ends it; then `end` it."""
    kept = _Kept(bounds.kept_bytes + len(bounds.mark))
    try:
        how = _until_its_end(process, stream.fileno(), kept, bounds)
    finally:
        returncode = end(process)
        stream.close()
    begun = kept.head.startswith(bounds.mark)
    unmarked = len(bounds.mark) if begun else 0
    return Finished(how, begun, returncode, kept.head[unmarked:], kept.tail, kept.written - unmarked)


class _Kept:
    """The two ends of a stream, never more than `most` bytes of each."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.head = b""
        self.tail = b""
        self.written = 0

    def add(self, chunk: bytes) -> None:
        self.written += len(chunk)
        room = self.most - len(self.head)
        self.head += chunk[:room]
        self.tail = (self.tail + chunk[room:])[-self.most :] if room < len(chunk) else self.tail


def _until_its_end(process: subprocess.Popen[bytes], fd: int, kept: _Kept, bounds: Bounds) -> Ending:
    begun = not bounds.mark
    deadline = time.monotonic() + (bounds.seconds if begun else bounds.start_seconds)
    os.set_blocking(fd, False)
    told = pidfd(process.pid)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as at_the_end:
        selector.register(fd, selectors.EVENT_READ)
        if told is not None:
            at_the_end.callback(os.close, told)
            selector.register(told, selectors.EVENT_READ)
        while True:
            left = max(0.0, deadline - time.monotonic())
            selector.select(left if told is not None else min(left, _LOOK_SECONDS))
            # Asked before the stream is read: what it wrote until its end is there by then.
            ended = _has_ended(process)
            while fd in selector.get_map() and (chunk := _read(fd)) is not None:
                if not chunk:
                    selector.unregister(fd)
                    break
                kept.add(chunk)
                if kept.written > bounds.output_bytes:
                    return "output"
                if not begun and kept.head.startswith(bounds.mark):
                    deadline = time.monotonic() + bounds.seconds
                    begun = True
                if time.monotonic() > deadline:
                    return "timeout"
            if ended:
                return "exited"
            if time.monotonic() > deadline:
                return "timeout"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Asked without reaping it, where the system can, so that its group can still be killed."""
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return process.poll() is not None


def _read(fd: int) -> bytes | None:
    """What is there; None if nothing is yet, empty at the end."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
