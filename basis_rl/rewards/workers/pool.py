"""A pool of worker processes that can be killed: no task can hang or crash the process that asks."""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from basis_rl.rewards.workers.failures import RewardInfrastructureError
from basis_rl.rewards.workers.process import Worker
from basis_rl.sandbox import Policy

_STARTUP_SECONDS = 120.0
_START_ATTEMPTS = 4
# Attempts for a task whose worker dies; more if it was killed from outside, which says less about the task.
_ATTEMPTS = 2
_ATTEMPTS_IF_KILLED = 5
# Tasks after which a worker is replaced, since what it calls may leak.
_MOST_TASKS = 5000
# Seconds without the end of a task after which this is logged, then after twice as many, and so on.
_SILENCE = 30.0
_log = logging.getLogger(__name__)

Status = Literal["ok", "timeout", "crashed", "starved", "late", "over_budget"]


@dataclass(frozen=True)
class Outcome:
    """How one task ended; `value` is what the worker answered, empty unless `status` is ``ok``.

    ``timeout``: the task itself took more CPU time than a task may, or, outside of a sandbox, where it may have waited
    for something, more time by the clock. The next three say nothing about the task (`failed`):

    - ``crashed``: the worker died on it, twice; or was killed from outside five times.
    - ``starved``: in a sandbox it reached its wall-clock limit twice, without the CPU time that is granted to it.
    - ``late``: the whole batch reached its deadline first.

    ``over_budget``: the time that the caller granted to the whole batch ended first; nothing failed.
    """

    status: Status
    value: dict[str, Any]

    @property
    def failed(self) -> bool:
        """A failure of the infrastructure: nothing is known of the task."""
        return self.status not in ("ok", "timeout", "over_budget")


def _close_all(workers: list[Worker], owner: int) -> None:
    # If a forked copy of the trainer ends, the workers still belong to the original.
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.ask_to_end()
    while workers:
        workers.pop().close()


class WorkerPool:
    """Runs tasks in up to `size` processes and always returns, in input order.

    A task has `timeout` seconds from its dispatch; then its worker is killed and replaced. A task whose worker dies is
    tried once more on a fresh one. Safe to call from any thread, one batch at a time. Workers are started by
    subprocess, never by a fork of this process, which may hold CUDA and many threads.

    A hard task is ended by its CPU time, and the wall-clock limit is the fallback. In a sandbox nothing can be waited
    for: a task that reaches it has met a busy machine, and is tried once more. n tasks take at most
    ``2 * ceil(n / size) * timeout`` seconds and 2 startups (120 s each at most), whatever they do.

    Args:
        command: how to start a worker; it speaks the protocol of `basis_rl.rewards.workers.serve_tasks`.
        size: number of processes. They start with the first batch, unless `start` is called before.
        timeout: seconds for a task, wall clock.
        policy: what a worker may do (`basis_rl.sandbox`), each in a temporary folder of its own, which is removed with
            it. None: no sandbox.
        env: variables that workers have besides paths and language, if they are in no sandbox.
        name: what the tasks are, in the log.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        timeout: float,
        *,
        policy: Policy | None = None,
        env: Mapping[str, str] | None = None,
        name: str = "The grading",
    ) -> None:
        self.command = list(command)
        self.size = size
        self.timeout = timeout
        self.policy = policy
        self.env = env
        self.name = name
        self._owner = os.getpid()
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._workers, self._owner)

    def run(self, tasks: Sequence[dict[str, Any]], seconds: float | None = None) -> list[Outcome]:
        """Outcome of every task, in input order.

        Args:
            tasks: objects that JSON can hold.
            seconds: wall-clock seconds for the whole batch, including the start of workers; tasks that are not done
                then are ``over_budget``. None: no such limit.

        Raises:
            RewardInfrastructureError: no worker can be started, several attempts in a row.
        """
        if not tasks:
            return []
        with self._lock:
            return _Batch(self, tasks, seconds).run()

    def start(self) -> None:
        """Start the workers without waiting for them. If one cannot start, the next `run` reports it."""
        with self._lock, suppress(OSError):
            while len(self._workers) < self.size:
                self._workers.append(self.worker())

    def worker(self) -> Worker:
        """A new worker, which is not among those of the pool yet.

        Raises:
            OSError: it cannot be started.
        """
        return Worker(self.command, self.policy, _STARTUP_SECONDS, self.env)

    def close(self) -> None:
        """End all workers. The next `run` starts new ones."""
        with self._lock:
            _close_all(self._workers, self._owner)


class _Batch:
    """One call of `WorkerPool.run`: the tasks that wait, and what became of each."""

    def __init__(self, pool: WorkerPool, tasks: Sequence[dict[str, Any]], seconds: float | None) -> None:
        self.pool = pool
        self.tasks = tasks
        self.queue = deque(range(len(tasks)))
        self.tries: Counter[tuple[int, str]] = Counter()
        self.outcomes: dict[int, Outcome] = {}
        self.failed_starts = 0
        # When the last task ended or a wait was logged, and how long the next silence may be.
        self.heard = time.monotonic()
        self.silence = _SILENCE
        rounds = math.ceil(len(tasks) / pool.size)
        # Twice, because each task may be tried a second time.
        longest = 2 * (rounds * pool.timeout + _STARTUP_SECONDS)
        granted = math.inf if seconds is None else seconds
        # Whichever limit comes first decides whether unfinished tasks are the caller's wish or a failure.
        self.late: Status = "over_budget" if granted < longest else "late"
        self.deadline = time.monotonic() + min(granted, longest)

    def run(self) -> list[Outcome]:
        try:
            while len(self.outcomes) < len(self.tasks):
                if time.monotonic() > self.deadline:
                    self._give_up()
                    break
                self._fill()
                self._wait()
                self._tell_silence()
        except BaseException:
            # Their sockets may hold half an answer to a task of this batch, which the next batch would read.
            _close_all(self.pool._workers, self.pool._owner)
            raise
        return [self.outcomes[i] for i in range(len(self.tasks))]

    def _fill(self) -> None:
        workers = self.pool._workers
        for worker in [worker for worker in workers if worker.task is None and self._worn_out(worker)]:
            self._remove(worker)
        idle = sum(worker.task is None for worker in workers)
        while len(workers) < self.pool.size and len(self.queue) > idle:
            try:
                workers.append(self.pool.worker())
                idle += 1
            except OSError as error:
                self._start_failed(f"{type(error).__name__}: {error}")
        for worker in workers:
            if worker.ready and worker.task is None and self.queue:
                index = self.queue.popleft()
                worker.dispatch(index, self.tasks[index], self.pool.timeout)

    def _worn_out(self, worker: Worker) -> bool:
        """Whether a worker has exited, or has done many tasks."""
        return worker.tasks >= _MOST_TASKS or (worker.ready and worker.process.poll() is not None)

    def _tell_silence(self) -> None:
        """Log, ever more rarely, that no task ends."""
        if time.monotonic() - self.heard < self.silence:
            return
        message = "%s: no call has ended for %d s; %d of %d have, and one may take up to %g s."
        _log.warning(message, self.pool.name, self.silence, len(self.outcomes), len(self.tasks), self.pool.timeout)
        self.silence *= 2

    def _wait(self) -> None:
        busy = [worker for worker in self.pool._workers if worker.task is not None or not worker.ready]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.fd, selectors.EVENT_READ, worker)
            until = min([self.deadline, self.heard + self.silence, *(worker.deadline for worker in busy)])
            for key, _ in selector.select(max(0.0, until - time.monotonic())):
                self._receive(key.data)
        for worker in busy:
            if worker in self.pool._workers and time.monotonic() > worker.deadline:
                self._ends(worker, expired=True)

    def _receive(self, worker: Worker) -> None:
        answer = worker.read()
        if answer == "lost":
            self._ends(worker, expired=False)
        elif answer is not None and not worker.ready:
            worker.has_started()
            self.failed_starts = 0
        elif answer is not None:
            self.outcomes[worker.has_answered()] = Outcome("ok", answer)
            # What has filled the memory may be held for good.
            worker.tasks = _MOST_TASKS if "memory" in answer else worker.tasks
            self.heard = time.monotonic()
            self.silence = _SILENCE

    def _ends(self, worker: Worker, expired: bool) -> None:
        """Handle a worker that has exited, broken the protocol or, if `expired`, passed its deadline."""
        # Unless it expired, its output has ended, so it is about to exit.
        code = None if expired else worker.return_code()
        if not worker.ready:
            self._start_failed(worker.last_words())
        elif worker.task is not None and expired:
            if self.pool.policy is None:
                self.outcomes[worker.task] = Outcome("timeout", {})
            else:
                self._again(worker.task, "starved", _ATTEMPTS)
        elif worker.task is not None:
            if code == -signal.SIGPROF:
                self.outcomes[worker.task] = Outcome("timeout", {})
            else:
                # SIGKILL comes from outside, such as the kernel's OOM killer: a task that takes too much memory gets a
                # MemoryError from its own limit instead.
                killed = code == -signal.SIGKILL
                self._again(worker.task, "crashed", _ATTEMPTS_IF_KILLED if killed else _ATTEMPTS)
        self._remove(worker)

    def _again(self, task: int, status: Status, attempts: int) -> None:
        self.tries[task, status] += 1
        if self.tries[task, status] >= attempts:
            self.outcomes[task] = Outcome(status, {})
        else:
            self.queue.append(task)

    def _give_up(self) -> None:
        for worker in [worker for worker in self.pool._workers if worker.task is not None or not worker.ready]:
            self._remove(worker)
        for task in range(len(self.tasks)):
            self.outcomes.setdefault(task, Outcome(self.late, {}))

    def _start_failed(self, last_words: str) -> None:
        """Raise after several failed starts in a row without a success: a single one may be temporary."""
        self.failed_starts += 1
        if self.failed_starts >= _START_ATTEMPTS:
            raise RewardInfrastructureError(
                f"No reward worker can be started ({' '.join(self.pool.command)}), {self.failed_starts} attempts "
                f"failed. The last one said:\n{last_words}"
            )
        time.sleep(0.1 * self.failed_starts)

    def _remove(self, worker: Worker) -> None:
        self.pool._workers.remove(worker)
        worker.close()
