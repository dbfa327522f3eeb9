"""`basis_rl.sandbox.run` itself: its clock, its bounds, what it keeps and what it ends, without a sandbox around it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from basis_rl.sandbox import Policy, run
from basis_rl.sandbox.run import Bounds, end, follow, start
from tests.support.processes import gone, wait_until

POLICY = Policy(memory_bytes=1, cpu_seconds=1, file_bytes=1, processes=1, folder=None, readable=())
BOUNDS = {"seconds": 30.0, "output_bytes": 1 << 20, "kept_bytes": 1 << 10}


@pytest.fixture(params=["pidfd", "no pidfd"])
def bare(request, monkeypatch):
    """Commands are run as they are; with and without the kernel telling of an end."""
    monkeypatch.setattr(run, "sandboxed", lambda command, policy: list(command))
    if request.param == "no pidfd":
        monkeypatch.setattr(run, "pidfd", lambda pid: None)


def ran(code, given=b"", stderr=subprocess.DEVNULL, **changes):
    command = [sys.executable, "-I", "-S", "-c", f"import os, sys, time\n{code}"]
    return run.run(command, POLICY, given, Bounds(**{**BOUNDS, **changes}), stderr)


def test_what_is_given_and_what_it_says(bare, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    done = ran("print(sys.stdin.read()[::-1]); sys.stderr.write('no'); sys.exit(3)", b"abc")
    assert (done.how, done.begun, done.returncode, done.head, done.tail) == ("exited", True, 3, b"cba\n", b"")
    assert ran("sys.stderr.write('no')", stderr=subprocess.STDOUT).head == b"no"
    seen = ran("print(os.environ)").head
    assert b"HOME" in seen
    assert b"hf_secret" not in seen


def test_the_two_ends_of_the_output_are_kept_and_the_rest_is_counted(bare):
    done = ran("sys.stdout.write('M' + ''.join(map(str, range(9000))))", mark=b"M", kept_bytes=100)
    text = "".join(map(str, range(9000))).encode()
    assert (done.head, done.tail, done.written) == (text[:100], text[-101:], len(text))
    done = ran("sys.stdout.write('x' * 150)", kept_bytes=100)
    assert (done.head, done.tail, done.written) == (b"x" * 100, b"x" * 50, 150)
    assert ran("sys.stdout.write('x' * 100)", kept_bytes=100).tail == b""


def test_who_writes_too_much_is_killed(bare):
    began = time.monotonic()
    done = ran("while True: sys.stdout.write('x' * 5000)", output_bytes=50_000)
    assert done.how == "output"
    assert 50_000 < done.written <= 50_000 + (1 << 16)
    assert time.monotonic() - began < 20
    assert ran("sys.stdout.write('x' * 50000)", output_bytes=50_000).how == "exited"


def test_the_clock_begins_with_the_mark(bare):
    done = ran("time.sleep(0.8); print('M', end='', flush=True)", mark=b"M", seconds=0.7)
    assert (done.how, done.begun, done.head, done.written) == ("exited", True, b"", 0)
    began = time.monotonic()
    done = ran("print('M' + 'so far', flush=True); time.sleep(100)", mark=b"M", seconds=0.3)
    assert (done.how, done.begun, done.head) == ("timeout", True, b"so far\n")
    done = ran("print('other', flush=True); time.sleep(100)", mark=b"M", start_seconds=0.8)
    assert (done.how, done.begun, done.head) == ("timeout", False, b"other\n")
    for code in ("time.sleep(100)", "while True: sys.stdout.write('x'); sys.stdout.flush()"):  # within its other bounds
        assert ran(code, seconds=0.3, output_bytes=1 << 40).how == "timeout"
    assert time.monotonic() - began < 20


def test_who_closes_its_output_is_waited_for(bare):
    done = ran("print('all', flush=True); os.close(1); os.close(2); time.sleep(0.3); os._exit(4)")
    assert (done.how, done.returncode, done.head) == ("exited", 4, b"all\n")


FORKED = "if os.fork() == 0:\n    print(os.getpid(), flush=True)\n    time.sleep(100)\ntime.sleep({})"


@pytest.mark.parametrize("seconds", [0.5, 100])
def test_its_children_end_with_it_though_they_hold_the_output(seconds, bare):
    began = time.monotonic()
    done = ran(FORKED.format(seconds), seconds=20.0 if seconds < 1 else 0.8)
    assert time.monotonic() - began < 10
    assert done.how == ("exited" if seconds < 1 else "timeout")
    wait_until(lambda: gone(int(done.head)))


def test_two_with_crossed_pipes_end_together(bare):
    to_first, from_second = os.pipe()
    to_second, from_first = os.pipe()
    python = [sys.executable, "-I", "-S", "-c"]
    upper = "for line in open(0): print(line.upper(), end='', flush=True)"
    echo = start([*python, upper], POLICY, to_second, from_second)
    ask = "import sys\nprint('a', flush=True)\nsys.stderr.write(input() + '\\n')"
    asking = start([*python, ask], POLICY, to_first, from_first, subprocess.PIPE)
    for descriptor in (to_first, from_second, to_second, from_first):
        os.close(descriptor)
    assert follow(asking, asking.stderr, Bounds(**BOUNDS)).head == b"A\n"
    assert end(echo) in (0, -signal.SIGKILL)
    assert end(echo) == echo.returncode  # twice is no error


def test_nothing_stays_open(bare):
    before = len(os.listdir("/proc/self/fd"))
    ran("print(1)")
    with pytest.raises(OSError, match="no such command"):
        run.run(["no such command"], POLICY, b"", Bounds(**BOUNDS))
    assert len(os.listdir("/proc/self/fd")) == before
