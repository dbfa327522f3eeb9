"""Threads that wait for programs, and that the interpreter does not wait for at its end."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads:
    """As `concurrent.futures.ThreadPoolExecutor`, but a process that ends does not first finish what was submitted."""

    def __init__(self, number: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        for i in range(number):
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}-{i}", daemon=True).start()
        weakref.finalize(self, _end, self._jobs, number)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Call it when a thread is free."""
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return future


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                # Whoever waits for the result would wait forever without it.
                future.set_exception(error)
        del job, future, work


def _end(jobs: queue.SimpleQueue[_Job | None], number: int) -> None:
    for _ in range(number):
        jobs.put(None)
