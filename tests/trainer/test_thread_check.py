"""What only works in the main thread, or in the thread that made it, is found before a stream uses it in others."""

import signal
import sqlite3
import threading

import pytest

from basis_rl.trainer import thread_check
from basis_rl.trainer.thread_check import check_environment, check_in_threads, check_reward

ROW = {"prompt": "1 + 1", "solution": "2"}


def impatient(prompts, completions, **kwargs):
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(5)
    try:
        return [float(len(each)) for each in completions]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Calm:
    def __init__(self):
        self.thread = threading.get_ident()

    def reset(self, **row):
        assert row == ROW


class Database(Calm):
    def __init__(self):
        self.rows = sqlite3.connect(":memory:")

    def reset(self, **row):
        self.rows.execute("select 1")


class Alarmed(Calm):
    def __init__(self):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))


def test_a_reward_with_an_alarm_is_refused():
    assert impatient(["x"], ["ab"]) == [2.0]
    with pytest.raises(ValueError, match=r"reward function 'impatient' in several threads.*ValueError: signal only"):
        check_reward(impatient, ROW)


@pytest.mark.parametrize("factory", [Database, Alarmed])
def test_an_environment_that_belongs_to_a_thread_is_refused(factory):
    with pytest.raises(ValueError, match=rf"environment '{factory.__name__}' in several threads"):
        check_environment(factory, ROW)


def test_an_environment_is_made_and_reset_in_two_threads():
    used = []

    class Noted(Calm):
        def reset(self, **row):
            super().reset(**row)
            used.extend([self.thread, threading.get_ident()])

    check_environment(Noted, ROW)
    assert len({*used, threading.get_ident()}) == 3


def test_other_faults_are_not_blamed_on_threads():
    """What fails everywhere, what is not there in time, and what cannot be called without a rollout."""
    calls = []

    def broken(completions, **kwargs):
        calls.append(threading.current_thread() is threading.main_thread())
        raise OSError("no judge")

    check_reward(broken, ROW)
    assert calls == [False, True]
    check_reward(lambda completions, environments, **kwargs: calls.append(True), ROW)
    assert len(calls) == 2


def test_what_takes_long_is_left_alone(monkeypatch):
    monkeypatch.setattr(thread_check, "_PATIENCE", 0.05)
    ended = threading.Event()
    later = []
    check_in_threads("it", None, lambda: ended.wait(10), lambda: later.append(True))
    ended.set()
    assert later == []


def test_what_works_is_called_once():
    seen = []

    def reward(prompts, completions, solution, truncated, **kwargs):
        seen.append((prompts, completions, solution, truncated))
        return [1.0]

    async def later(completions, **kwargs):
        seen.append(completions)
        return [1.0]

    check_reward(reward, ROW)
    check_reward(later, ROW)
    assert seen == [(["1 + 1"], ["1"], ["2"], [False]), ["1"]]
