"""DaemonThreads: results, errors, cancelled work, and that the threads end with their object."""

import threading
import time

import pytest

from basis_rl.tools.threads import DaemonThreads


def named(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_results_and_errors_reach_who_waits():
    threads = DaemonThreads(2, "answering")
    assert [threads.submit(lambda i=i: i * i).result(10) for i in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(10)
    assert threads.submit(lambda: 7).result(10) == 7  # the thread has lived on
    assert all(thread.daemon for thread in named("answering"))


def test_what_is_cancelled_is_not_done():
    threads, done, go = DaemonThreads(1, "cancelling"), [], threading.Event()
    first = threads.submit(go.wait)
    second = threads.submit(lambda: done.append(2))
    third = threads.submit(lambda: done.append(3))
    assert second.cancel()
    go.set()
    assert first.result(10)
    third.result(10)
    assert done == [3]


def test_threads_end_with_their_object():
    threads = DaemonThreads(3, "ending")
    assert len(named("ending")) == 3
    del threads
    until = time.monotonic() + 10
    while named("ending"):
        assert time.monotonic() < until
        time.sleep(0.01)
