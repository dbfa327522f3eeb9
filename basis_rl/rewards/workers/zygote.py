"""A process that has done the imports: workers are forked from it, which takes milliseconds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from basis_rl.rewards.workers.process import PATIENCE, Started
from basis_rl.sandbox import Policy, isolation
from basis_rl.sandbox.kernel import pidfd

_KILLED = -int(signal.SIGKILL)


def can_fork(policy: Policy | None) -> bool:
    """Whether a worker that is forked inside of a sandbox can be held there as well as one in a sandbox of its own."""
    return policy is not None and sys.platform == "linux" and "seccomp" in isolation().mechanisms


class Zygote(Started):
    """The process, in a sandbox; `basis_rl.rewards.workers.serve_tasks.serve_forks` is what it does.

    Over one socket go the orders, with the number of the worker and the worker's end of its own socket, and come back
    the ends of workers, with what they ended by. When it ends, everything that it has forked ends, by its sandbox.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], policy: Policy) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # The workers refuse themselves new processes, which the zygote alone may start.
            super().__init__([*command, "fork"], replace(policy, processes=None), theirs)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.gone = False
        self._last = 0
        self._codes: dict[int, int] = {}

    def fork(self, end: socket.socket) -> ForkedProcess:
        """A process that will serve `end`, and say when it is ready.

        Raises:
            OSError: the zygote does not take the order.
        """
        self._last += 1
        socket.send_fds(self._socket, [str(self._last).encode()], [end.fileno()], socket.MSG_DONTWAIT)
        return ForkedProcess(self, self._last)

    def code(self, number: int, patience: float) -> int | None:
        """What worker `number` has ended by, as `subprocess` says it; None if it has not, in `patience` seconds."""
        until = time.monotonic() + patience
        while number not in self._codes and not self.gone:
            if not select.select([self._socket], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            self._read()
        # Who ends with the zygote has been killed, by whom ever.
        return self._codes.pop(number, _KILLED)

    def _read(self) -> None:
        try:
            message = self._socket.recv(64)
        except OSError:
            message = b""
        self.gone = self.gone or not message
        if message:
            number, code = json.loads(message)
            self._codes[number] = code

    def close(self) -> int:
        """End it and its workers."""
        self.gone = True
        self._socket.close()
        return super().close()


class ForkedProcess:
    """One that a zygote has forked. It is known when it is ready: the kernel names who sent that."""

    def __init__(self, zygote: Zygote, number: int) -> None:
        self.zygote, self.number = zygote, number
        self.pid: int | None = None  # never a number that `os.kill` would take for a group or for everybody
        self.pidfd: int | None = None
        self.returncode: int | None = None

    def is_known(self, pid: int) -> None:
        if pid > 0:
            self.pid, self.pidfd = pid, pidfd(pid)

    def ask_to_end(self) -> None:
        if self.returncode is None and self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self.pidfd is not None:  # its number may be another's by now, its descriptor cannot
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                else:
                    os.kill(self.pid, signal.SIGKILL)

    def wait(self, patience: float) -> int | None:
        if self.returncode is None:
            self.returncode = self.zygote.code(self.number, patience)
        return self.returncode

    def close(self) -> int | None:
        self.ask_to_end()
        # Of who was never ready no process is known. It ends when it finds its socket closed, or with the zygote.
        code = self.wait(PATIENCE) if self.pid is not None or self.zygote.gone else None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        return code

    def last_words(self) -> str:
        return self.zygote.last_words()
