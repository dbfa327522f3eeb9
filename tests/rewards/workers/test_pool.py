"""WorkerPool: whose fault an unfinished task is, what becomes of workers, and that nothing of them is left."""

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.workers import pool, process, serve_tasks
from basis_rl.rewards.workers.failures import RewardInfrastructureError
from basis_rl.rewards.workers.pool import WorkerPool
from basis_rl.sandbox import Policy, isolation, python_paths

ROOT = Path(__file__).resolve().parents[3]
WORKER = f"""
import json, os, runpy, signal, socket, sys, threading, time
serve_tasks = runpy.run_path({serve_tasks.__file__!r})["serve_tasks"]
hoard = []

def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def answer(task):
    if "affinity" in task:
        os.sched_setaffinity(0, {{task["affinity"]}})
    if "idle" in task:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if "thread" in task:
        thread = threading.Thread(target=burn, args=(task["thread"],))
        thread.start()
        thread.join()
    burn(task.get("burn", 0))
    time.sleep(task.get("sleep", 0))
    burn(task.get("after", 0))
    if "signal" in task:
        os.kill(os.getpid(), task["signal"])
    if "bytes" in task:
        hoard.append(b"x" * task["bytes"])
    if "code" in task:
        return {{"value": repr(eval(task["code"]))}}
    return {{"n": task.get("n"), "pid": os.getpid(), "held": sum(map(len, hoard))}}

serve_tasks(answer, cpu_seconds=float(sys.argv[1]))
"""


def policy(**changes):
    granted = {"memory_bytes": 1 << 30, "cpu_seconds": None, "file_bytes": 1 << 20, "processes": 1, "folder": None}
    return Policy(**{**granted, "readable": python_paths(), **changes})


def make(size=2, timeout=30.0, cpu_timeout=5.0, worker=WORKER, shut_in=True, **options):
    command = [sys.executable, "-P", "-c", worker, str(cpu_timeout)]
    return WorkerPool(command, size, timeout, cpu_timeout=cpu_timeout, policy=policy() if shut_in else None, **options)


def children():
    return set(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """No process, descriptor or folder that was not there before, after each test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    isolation()
    gc.collect()  # pools of earlier tests may be left in cycles, and would go, with what they hold, during this one
    before = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert not any(tmp_path.glob("basis_rl_worker_*"))
    assert (children(), len(os.listdir("/proc/self/fd"))) == before


@pytest.fixture
def busy_processor():
    """Three processes that compute on the first processor, for ever."""
    first = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{first}}})\nprint(flush=True)\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
    for hog in hogs:
        hog.stdout.readline()
    yield first
    for hog in hogs:
        hog.kill()
        hog.wait()
        hog.stdout.close()


@pytest.mark.parametrize("shut_in", [True, False], ids=["sandbox", "no sandbox"])
def test_a_task_that_computes_too_long_or_sleeps_is_its_own_fault(shut_in):
    for timeout, too_long in ((60.0, "burn"), (4.0, "sleep")):  # who computes is stopped by its CPU time
        workers = make(timeout=timeout, cpu_timeout=0.5, shut_in=shut_in)
        outcomes = workers.run([{too_long: 100}, {"n": 1}])
        assert [outcome.status for outcome in outcomes] == ["timeout", "ok"]
        assert not any(outcome.failed for outcome in outcomes)
        workers.close()


def test_a_task_has_its_cpu_time_however_loaded_the_machine_is(busy_processor):
    workers = make(size=1, timeout=60.0, cpu_timeout=1.0)
    began = time.monotonic()
    outcomes = workers.run([{"burn": 0.6, "affinity": busy_processor}, {"burn": 2.0}])
    assert [outcome.status for outcome in outcomes] == ["ok", "timeout"]
    assert time.monotonic() - began > 1.5  # it was longer under way than its limit says
    workers.close()


@pytest.mark.parametrize("work", ["burn", "thread"])
def test_a_task_that_the_machine_starves_is_tried_again_and_then_nobody_knows(work, busy_processor):
    # Where sessions are not scheduled as groups, an idle process beside three others gets a slice every few seconds: at
    # its deadline it has been in the queue without a break.
    workers = make(size=1, timeout=2.0, cpu_timeout=20.0, shut_in=work == "burn")
    outcomes = workers.run([{work: 5, "affinity": busy_processor, "idle": True}, {"n": 3}])
    assert [outcome.status for outcome in outcomes] == ["starved", "ok"]
    assert outcomes[0].failed
    workers.close()


def test_waiting_that_the_kernel_has_not_yet_counted_is_no_sleep(monkeypatch):
    # It counts a wait for a processor when it is over.
    seen = process._threads
    monkeypatch.setattr(process, "_threads", lambda pid: {key: (s, 0.0) for key, (s, _) in seen(pid).items()})
    workers = make(timeout=1.0, cpu_timeout=20.0)
    outcomes = workers.run([{"burn": 100}, {"sleep": 100}])
    assert [outcome.status for outcome in outcomes] == ["starved", "timeout"]
    workers.close()


def test_who_sleeps_and_computes_only_at_the_deadline_has_slept():
    workers = make(size=1, timeout=3.0, cpu_timeout=20.0)
    assert [outcome.status for outcome in workers.run([{"sleep": 2.5, "after": 100}])] == ["timeout"]
    workers.close()


def test_a_worker_that_somebody_stops_is_starved_too():
    workers = make(size=1, timeout=5.0)  # which is also what the second one has
    workers.run([{"n": 0}])
    first = workers._workers[0]
    os.kill(first.pid, signal.SIGSTOP)
    assert [outcome.status for outcome in workers.run([{"n": 1}])] == ["ok"]  # by the second one
    assert workers._workers[0] is not first
    workers.close()


def test_death_by_its_own_hand_and_from_outside():
    workers = make()
    outcomes = workers.run([{"signal": signal.SIGSEGV}, {"n": 1}, {"signal": signal.SIGKILL}, {"code": "os._exit(3)"}])
    assert [outcome.status for outcome in outcomes] == ["crashed", "ok", "crashed", "crashed"]
    workers.close()


def test_workers_killed_at_random_change_no_verdict():
    golds = [rf"x^{i} + \frac{{{i}}}{{7}}" for i in range(300)]
    answers = [rf"\boxed{{\frac{{{i}}}{{7}} + x^{{{i if i % 3 else i + 1}}}}}" for i in range(300)]
    reward = MathVerifyReward(num_workers=3)
    undisturbed = reward([], answers, golds)
    assert set(undisturbed) == {0.0, 1.0}
    reward.close()
    again, over, hits = MathVerifyReward(num_workers=3), threading.Event(), Counter()
    choice = random.Random(0)

    def kill():
        while sum(hits.values()) < 12 and not over.wait(choice.uniform(0.1, 0.5)):
            # Of a task that is hit five times nobody knows the verdict.
            ready = [worker for worker in list(again._pool._workers) if worker.ready and hits[worker.task] < 3]
            for worker in choice.sample(ready, k=min(1, len(ready))):
                hits[worker.task] += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(choice.choice([worker.process.pid, worker.pid]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        metrics = {}
        disturbed = again([], answers[:240], golds[:240], log_metric=metrics.__setitem__)
    finally:
        over.set()
        killer.join()
    for first in range(240, 300, 20):  # and while nobody looks
        for worker in again._pool._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        disturbed += again([], answers[first : first + 20], golds[first : first + 20])
    again.close()
    assert disturbed == undisturbed
    assert sum(hits.values()) > 2
    assert metrics["reward/infrastructure"] == 0


def test_from_many_threads():
    workers = make(size=2)
    results = {}

    def work(k):
        results[k] = [outcome.value["n"] for outcome in workers.run([{"n": (k, i)} for i in range(20)])]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [[k, i] for i in range(20)] for k in range(8)}
    # started by a thread that has ended since, and alive
    assert all(worker.process.poll() is None for worker in workers._workers)
    workers.close()


ODD = {
    "no JSON": "print('garbage', flush=True)",
    "no object": "print('3', flush=True)",
    "two answers": "print('{}\\n{}', flush=True)",
    "no end": "[print('x' * (1 << 20), end='', flush=True) for _ in range(20)]",
    "no output any more": "os.close(1); time.sleep(60)",
    "half an answer": "print('{', end='', flush=True); os._exit(0)",
}


@pytest.mark.parametrize("oddity", ODD)
def test_a_worker_that_breaks_the_protocol_breaks_nothing_else(oddity, monkeypatch):
    monkeypatch.setattr(process, "_PATIENCE", 1.0)
    odd = f"""
import os, sys, time
print('{{"ready": true}}', flush=True)
for line in sys.stdin:
    if 'odd' in line:
        {ODD[oddity]}
    else:
        print('{{"fine": true}}', flush=True)
"""
    workers = make(size=1, timeout=20.0, worker=odd)
    outcomes = workers.run([{"n": 1}, {"odd": 1}, {"n": 2}, {"n": 3}])
    assert [outcome.status for outcome in outcomes] == ["ok", "crashed", "ok", "ok"]
    assert outcomes[2].value == {"fine": True}
    workers.close()


def test_workers_are_replaced_when_they_are_old_or_fat():
    workers = make(size=1, max_tasks=5)
    pids = [outcome.value["n"] for outcome in workers.run([{"n": i} for i in range(20)])]
    assert pids == list(range(20))
    assert workers._workers[0].tasks <= 5
    workers.close()
    workers = make(size=1, max_growth=30 << 20)
    held = [outcome.value["held"] for outcome in workers.run([{"bytes": 4 << 20} for _ in range(40)])]
    assert max(held) <= 80 << 20
    assert sum(held[i] < held[i - 1] for i in range(1, 40)) >= 2
    workers.close()


def test_a_batch_has_an_end_whatever_its_workers_do(monkeypatch):
    workers = make(size=1, timeout=1.0)
    workers.run([{"n": 0}])  # so that the first task meets a worker that is ready
    # Those that replace it are not ready in time. Four in a row would end the batch with an error: after
    # 1 + 4 * 3 seconds at least, and its deadline is after 2 * (2 * 1 + 3).
    workers.command[-2] = "import time\ntime.sleep(600)"
    monkeypatch.setattr(pool, "_STARTUP_SECONDS", 3.0)
    began = time.monotonic()
    outcomes = workers.run([{"sleep": 60}] * 2)
    assert time.monotonic() - began < 25
    assert [outcome.status for outcome in outcomes] == ["timeout", "late"]
    assert outcomes[-1].failed
    workers.close()


def test_a_worker_is_shut_in(tmp_path):
    workers = make()
    codes = [
        "sorted(name for name in os.environ if 'TOKEN' in name or 'KEY' in name)",
        f"open({str(tmp_path / 'x')!r}, 'w')",
        "socket.create_connection(('127.0.0.1', 1))",
        "open('mine', 'w').write('x')",
    ]
    os.environ["HF_TOKEN"] = "secret"
    try:
        values = [outcome.value for outcome in workers.run([{"code": code} for code in codes])]
    finally:
        del os.environ["HF_TOKEN"]
    assert values[0] == {"value": "[]"}
    assert values[3] == {"value": "1"}
    if isolation().writes:
        assert "Error" in values[1]["error"]
    if isolation().network:
        assert "Error" in values[2]["error"]
        assert "refused" not in values[2]["error"]
    workers.close()


def test_a_forked_copy_of_the_trainer_has_workers_of_its_own():
    workers = make(size=1)
    workers.run([{"n": 1}])
    process = workers._workers[0].process
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome = workers.run([{"n": 2}])[0]
            workers.close()
            os.write(writer, outcome.status.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 10) == b"ok"
    os.close(reader)
    assert process.poll() is None
    assert workers.run([{"n": 3}])[0].value["n"] == 3
    assert workers._workers[0].process is process
    workers.close()


END = """
import os, sys, signal, threading
sys.path.insert(0, {root!r})
from tests.rewards.workers.test_pool import make
pool = make(size=2)
pool.run([{{"n": i}} for i in range(4)])
print(*(pid for worker in pool._workers for pid in (worker.process.pid, worker.pid)), flush=True)
if {how!r} == "while grading":
    threading.Thread(target=pool.run, args=([{{"sleep": 100}}] * 2,), daemon=True).start()
    import time; time.sleep(0.3)
if {how!r} == "raise":
    raise ValueError
if {how!r} != "exit":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("how", ["exit", "raise", "kill", "while grading"])
def test_nothing_outlives_the_trainer(how, tmp_path):
    code = END.format(root=str(ROOT), how=how)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4, done.stderr
    until = time.monotonic() + 10
    while time.monotonic() < until and not (all(map(gone, pids)) and not list(tmp_path.glob("basis_rl_worker_*"))):
        time.sleep(0.05)
    assert all(map(gone, pids))
    assert list(tmp_path.glob("basis_rl_worker_*")) == []


def test_no_worker_is_an_infrastructure_error():
    workers = make(worker="raise SystemExit('no such module')")
    with pytest.raises(RewardInfrastructureError, match=r"(?s)4 attempts failed.*no such module"):
        workers.run([{"n": 1}])


def test_parameters_out_of_range():
    with pytest.raises(ValueError, match="above 0"):
        WorkerPool(["true"], 1, 1.0, cpu_timeout=0.0)
