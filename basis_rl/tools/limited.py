"""One process with a limit on its time and its output, killed with all of its group."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_CHUNK = 1 << 16
_LOOK = 0.05  # seconds between looks whether the process has ended although somebody holds its output open


@dataclass(frozen=True)
class Finished:
    """How a process ended.

    Attributes:
        how: it exited (or was killed by others), its time was over, or it wrote too much.
        begun: it wrote the mark.
        returncode: as in `subprocess`; of no meaning where it was killed here.
        head: the beginning of what it wrote, stdout and stderr together.
        tail: the end of it, where it is not in the head.
        written: bytes it wrote, as far as they were read.
    """

    how: Literal["exited", "timeout", "output"]
    begun: bool
    returncode: int
    head: bytes
    tail: bytes
    written: int


class _Kept:
    """The two ends of a stream, never more than `most` bytes of each."""

    def __init__(self, most: int) -> None:
        self.most, self.head, self.tail, self.written = most, b"", b"", 0

    def add(self, chunk: bytes) -> None:
        self.written += len(chunk)
        room = self.most - len(self.head)
        self.head += chunk[:room]
        self.tail = (self.tail + chunk[room:])[-self.most :] if room < len(chunk) else self.tail


def run_limited(
    command: Sequence[str],
    *,
    given: bytes,
    environment: Mapping[str, str],
    folder: str,
    mark: bytes,
    timeout: float,
    start_timeout: float,
    keep_bytes: int,
    most_bytes: int,
) -> Finished:
    """Run a command and wait for it.

    The time runs from when `mark` has been written, which shows that what the command is about has begun; `mark` is not
    part of the output. Until then `start_timeout` counts.

    Args:
        command: what to run; in a session of its own.
        given: its standard input.
        environment: its whole environment.
        folder: where it starts.
        mark: what it writes first.
        timeout: seconds after `mark`.
        start_timeout: seconds until then.
        keep_bytes: of the head and of the tail of the output, each.
        most_bytes: it is killed when it writes more.

    Raises:
        OSError: it cannot be started.
    """
    with tempfile.TemporaryFile() as file:
        file.write(given)
        file.seek(0)
        process = subprocess.Popen(
            list(command),
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )
    assert process.stdout is not None
    kept = _Kept(keep_bytes + len(mark))
    try:
        how = _follow(process, process.stdout.fileno(), kept, mark, timeout, start_timeout, most_bytes)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # before it is reaped: its number is not another's yet
        process.stdout.close()
        returncode = process.wait()
    begun = kept.head.startswith(mark)
    head = kept.head.removeprefix(mark)
    return Finished(how, begun, returncode, head, kept.tail, kept.written - len(mark) * begun)


def _follow(
    process: subprocess.Popen[bytes],
    fd: int,
    kept: _Kept,
    mark: bytes,
    timeout: float,
    start_timeout: float,
    most_bytes: int,
) -> Literal["exited", "timeout", "output"]:
    deadline, begun, is_open = time.monotonic() + start_timeout, False, True
    os.set_blocking(fd, False)
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            while is_open and (chunk := _read(fd)) is not None:
                if not chunk:
                    selector.unregister(fd)
                    is_open = False
                    break
                kept.add(chunk)
                if kept.written > most_bytes:
                    return "output"
                if not begun and kept.head.startswith(mark):
                    deadline, begun = time.monotonic() + timeout, True
                if time.monotonic() > deadline:
                    return "timeout"
            if ended:
                return "exited"
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            if is_open:
                selector.select(min(left, _LOOK))
            else:
                time.sleep(min(left, _LOOK / 10))


def _read(fd: int) -> bytes | None:
    """What is there; None if nothing is yet, empty at the end."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
