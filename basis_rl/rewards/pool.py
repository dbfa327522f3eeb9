"""A pool of worker processes that can be killed: no task can hang or crash the process that asks."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

_STARTUP_SECONDS = 120.0
_START_ATTEMPTS = 4
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")


@dataclass(frozen=True)
class Outcome:
    """How one task ended; `value` is what the worker answered, empty unless `status` is ``ok``."""

    status: Literal["ok", "timeout", "crashed"]
    value: dict[str, Any]


class _Worker:
    """One process, one task in flight, its own pair of pipes. The clock starts when a task is dispatched."""

    def __init__(self, command: Sequence[str]) -> None:
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `kill`)
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env={**environment, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches the trainer, which ends the worker; and the group can be killed
        )
        assert self.process.stdout is not None
        self.fd = self.process.stdout.fileno()
        self.buffer, self.outbox = b"", b""
        assert self.process.stdin is not None
        self.stdin = self.process.stdin.fileno()
        os.set_blocking(self.stdin, False)  # a worker that does not read must not hold up the one who writes
        self.ready = False
        self.task: int | None = None
        self.deadline = time.monotonic() + _STARTUP_SECONDS

    def dispatch(self, index: int, task: dict[str, Any], timeout: float) -> None:
        self.task, self.deadline = index, time.monotonic() + timeout
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

    def read(self) -> dict[str, Any] | Literal["eof"] | None:
        """One answer, ``"eof"`` if the process is gone, None if the line is not complete yet."""
        chunk = os.read(self.fd, 1 << 16)
        if not chunk:
            return "eof"
        self.buffer += chunk
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return None
        self.buffer = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.stderr.close()

    def last_words(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")[-2000:].strip()


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()


class WorkerPool:
    """Runs tasks in up to `size` processes and always returns, in input order.

    A task that takes longer than `timeout` seconds from its dispatch is ended by SIGKILL and the worker replaced. A
    task whose worker dies is tried once more on a fresh one. Safe to call from any thread, one batch at a time.

    Args:
        command: how to start a worker; it speaks the protocol of `basis_rl.rewards.worker`.
        size: number of processes. They start with the first batch.
        timeout: seconds.
    """

    def __init__(self, command: Sequence[str], size: int, timeout: float) -> None:
        self.command, self.size, self.timeout = list(command), size, timeout
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def run(self, tasks: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Outcome of every task, in input order.

        Raises:
            RuntimeError: no worker can be started, several attempts in a row.
        """
        with self._lock:
            return _Batch(self, tasks).run()

    def close(self) -> None:
        """End all workers. The next `run` starts new ones."""
        with self._lock:
            _kill_all(self._workers)


class _Batch:
    def __init__(self, pool: WorkerPool, tasks: Sequence[dict[str, Any]]) -> None:
        self.pool, self.tasks = pool, tasks
        self.queue = deque(range(len(tasks)))
        self.retried: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}
        self.failed_starts = 0

    def run(self) -> list[Outcome]:
        try:
            while len(self.outcomes) < len(self.tasks):
                self._fill()
                self._wait()
        except BaseException:
            _kill_all(self.pool._workers)  # their pipes may hold half an answer to a task that nobody waits for
            raise
        return [self.outcomes[i] for i in range(len(self.tasks))]

    def _fill(self) -> None:
        workers = self.pool._workers
        while len(workers) < min(self.pool.size, len(self.tasks)) and self.queue:
            workers.append(_Worker(self.pool.command))
        for worker in workers:
            if worker.ready and worker.task is None and self.queue:
                index = self.queue.popleft()
                worker.dispatch(index, self.tasks[index], self.pool.timeout)

    def _wait(self) -> None:
        busy = [worker for worker in self.pool._workers if worker.task is not None or not worker.ready]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.fd, selectors.EVENT_READ, worker)
                if worker.outbox:
                    selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
            patience = min(worker.deadline for worker in busy) - time.monotonic()
            for key, _ in selector.select(max(0.0, patience)):
                if key.data not in self.pool._workers:
                    continue  # ended by an earlier event of this round: its pipes are closed
                if key.fd == key.data.stdin:
                    key.data.write()
                else:
                    self._receive(key.data)
        for worker in busy:
            if worker in self.pool._workers and time.monotonic() > worker.deadline:
                self._expire(worker)

    def _receive(self, worker: _Worker) -> None:
        answer = worker.read()
        if answer is None:
            return
        if answer == "eof":
            self._lost(worker)
        elif not worker.ready:
            worker.ready, worker.deadline = True, float("inf")
            self.failed_starts = 0
        else:
            assert worker.task is not None
            self.outcomes[worker.task] = Outcome("ok", answer)
            worker.task, worker.deadline, worker.outbox = None, float("inf"), b""

    def _lost(self, worker: _Worker) -> None:
        if not worker.ready:
            self._start_failed(worker)
        if worker.task is not None:
            if worker.task in self.retried:
                self.outcomes[worker.task] = Outcome("crashed", {})
            else:
                self.retried.add(worker.task)
                self.queue.append(worker.task)
        self._remove(worker)

    def _expire(self, worker: _Worker) -> None:
        if worker.task is None:
            self._start_failed(worker)
        else:
            self.outcomes[worker.task] = Outcome("timeout", {})
        self._remove(worker)

    def _start_failed(self, worker: _Worker) -> None:
        """One failure may be the machine's passing weakness; several in a row, with nobody started, are a fault."""
        self.failed_starts += 1
        if self.failed_starts >= _START_ATTEMPTS:
            raise RuntimeError(
                f"No reward worker can be started ({' '.join(self.pool.command)}), {self.failed_starts} attempts "
                f"failed. The last one said:\n{worker.last_words()}"
            )
        time.sleep(0.1 * self.failed_starts)

    def _remove(self, worker: _Worker) -> None:
        self.pool._workers.remove(worker)
        worker.kill()
