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
import weakref
from collections import Counter
from pathlib import Path

import psutil
import pytest

from basis_rl.rewards.workers import pool, process, serve_tasks
from basis_rl.rewards.workers.failures import RewardInfrastructureError
from basis_rl.rewards.workers.pool import WorkerPool
from basis_rl.sandbox import Isolation, Policy, isolation, python_paths
from tests.support.processes import gone, stat, wait_until

ROOT = Path(__file__).resolve().parents[3]
WORKER = f"""
import json, os, runpy, signal, socket, sys, threading, time
serve = runpy.run_path({serve_tasks.__file__!r})
hoard = []

def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def answer(task):
    burn(task.get("burn", 0))
    time.sleep(task.get("sleep", 0))
    if "signal" in task:
        os.kill(os.getpid(), task["signal"])
    if "hoard" in task:
        hoard.append(b"x")
    if "code" in task:
        return {{"value": repr(eval(task["code"]))}}
    return {{"n": task.get("n"), "held": len(hoard), **({{"memory": True}} if len(hoard) > 3 else {{}})}}

serve["serve_tasks"](answer, cpu_seconds=float(sys.argv[1]))
"""


def policy(**changes):
    granted = {"memory_bytes": 1 << 30, "cpu_seconds": None, "file_bytes": 1 << 20, "processes": 1, "folder": None}
    return Policy(**{**granted, "readable": python_paths(), **changes})


made = weakref.WeakSet()


def make(size=2, timeout=30.0, cpu_timeout=5.0, worker=WORKER, shut_in=True, processes=1, **options):
    command = [sys.executable, "-P", "-c", worker, str(cpu_timeout)]
    granted = policy(processes=processes) if shut_in else None
    workers = WorkerPool(command, size, timeout, policy=granted, **options)
    made.add(workers)
    return workers


def end(pid, number=signal.SIGKILL):
    """Signal one process below this one: 0, -1 or None would be others, as root all of the machine."""
    assert isinstance(pid, int)
    assert pid > 1
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
        above = pid
        while above not in (0, 1, os.getpid()):
            above = parent(above)
        assert above == os.getpid(), f"{pid} is none of ours"
        os.kill(pid, number)


def processes(worker):
    """The launcher of a worker's sandbox, and those within, the worker last; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(worker.process.pid)
        return [each.pid for each in (launcher, *launcher.children(recursive=True))]
    return []


def parent(pid):
    return int(stat(pid)[1])


def statuses(outcomes):
    return [outcome.status for outcome in outcomes]


def numbers(outcomes):
    return [outcome.value.get("n") for outcome in outcomes]


def children():
    return set(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()))


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Collections look at what these tests make, and not at all that was imported, which takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """No process, descriptor or folder that was not there before, after each test; pools are closed by it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    isolation()
    gc.collect()  # pools of earlier tests may be left in cycles, and would go, with what they hold, during this one
    processes, descriptors = children(), len(os.listdir("/proc/self/fd"))
    yield
    for workers in list(made):
        workers.close()
    assert not any(tmp_path.glob("basis_rl_worker_*"))
    assert children() <= processes
    # An earlier test's may have gone meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_started_workers_are_ready_when_the_first_task_comes(monkeypatch):
    """They are not waited for, and however late they are asked, they count as started in time."""
    monkeypatch.setattr(pool, "_STARTUP_SECONDS", 5.0)
    workers = make(size=2)
    began = time.monotonic()
    workers.start()
    workers.start()
    assert time.monotonic() - began < 2.0
    started = [worker.process.pid for worker in workers._workers]
    assert len(started) == 2
    time.sleep(5.5)
    assert numbers(workers.run([{"n": n} for n in range(4)])) == [0, 1, 2, 3]
    assert [worker.process.pid for worker in workers._workers] == started
    workers.close()


def test_what_keeps_a_worker_from_starting_is_told_by_the_first_batch():
    workers = WorkerPool(["/no/such/program"], 1, 5.0)
    workers.start()
    with pytest.raises(RewardInfrastructureError, match="No such file"):
        workers.run([{}])


@pytest.mark.parametrize("shut_in", [True, False], ids=["sandbox", "no sandbox"])
def test_a_task_that_computes_too_long_is_its_own_fault_and_time_by_the_clock_is_not(shut_in):
    tasks = [{"burn": 100}, {"n": 1}, {"burn": 0.2, "sleep": 0.6}]
    outcomes = make(timeout=60.0, cpu_timeout=0.5, shut_in=shut_in).run(tasks)
    assert statuses(outcomes) == ["timeout", "ok", "ok"]
    assert not any(outcome.failed for outcome in outcomes)


@pytest.mark.parametrize(("shut_in", "status"), [(True, "starved"), (False, "timeout")])
def test_what_only_the_clock_ends_waited_for_something_or_met_a_busy_machine(shut_in, status, monkeypatch):
    """In a sandbox nothing can be waited for, so it is tried again, and then nobody knows."""
    dispatched, real = [], process.Worker.dispatch
    spy = lambda self, number, *rest: dispatched.append(number) or real(self, number, *rest)  # noqa: E731
    monkeypatch.setattr(process.Worker, "dispatch", spy)
    outcomes = make(timeout=0.6, cpu_timeout=20.0, shut_in=shut_in).run([{"sleep": 100}, {"n": 3}])
    assert statuses(outcomes) == [status, "ok"]
    assert outcomes[0].failed is shut_in
    assert sorted(dispatched) == ([0, 0, 1] if shut_in else [0, 1])


COUNTING = """
import json, os, sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    task = json.loads(line)
    with open(task["file"], "a") as file:
        file.write("x")
    tries = os.path.getsize(task["file"])
    if tries <= task["deaths"]:
        os.kill(os.getpid(), task["signals"][tries - 1])
    print(json.dumps({"tries": tries}), flush=True)
"""


@pytest.mark.parametrize(
    ("signals", "most"),
    # After a death from outside one of its own is the second of two, and nobody tries a third time.
    [([signal.SIGTERM] * 99, 2), ([signal.SIGKILL] * 99, 5), ([signal.SIGKILL, signal.SIGTERM], 2)],
    ids=["its own death", "killed", "killed first"],
)
def test_a_task_whose_worker_dies_is_tried_a_fixed_number_of_times(signals, most, tmp_path):
    deaths = [0, 1, most - 1, most, len(signals)]
    files = [str(tmp_path / f"{i}") for i in range(len(deaths))]
    workers = make(worker=COUNTING, shut_in=False)
    tasks = [{"file": file, "deaths": n, "signals": signals} for file, n in zip(files, deaths, strict=True)]
    outcomes = workers.run(tasks)
    assert statuses(outcomes) == ["ok" if n < most else "crashed" for n in deaths]
    assert [os.path.getsize(file) for file in files] == [min(n + 1, most) for n in deaths]
    assert [outcome.value for outcome in outcomes] == [{"tries": n + 1} if n < most else {} for n in deaths]
    assert [outcome.failed for outcome in outcomes] == [n >= most for n in deaths]


def kill_at_random(workers, over, hits, most, seed=0):
    """Kill workers of a pool, each task's three times at most: of one that is hit five times nothing is known."""
    choice = random.Random(seed)
    while sum(hits.values()) < most and not over.wait(choice.uniform(0.02, 0.2)):
        ready = [worker for worker in list(workers._workers) if worker.ready and hits[worker.task] < 3]
        for worker in choice.sample(ready, k=min(1, len(ready))):
            for pid in choice.sample(alive := processes(worker), k=min(1, len(alive))):
                hits[worker.task] += 1
                end(pid)


def test_workers_killed_at_random_change_no_answer():
    workers, over, hits = make(size=3), threading.Event(), Counter()
    killer = threading.Thread(target=kill_at_random, args=(workers, over, hits, 8))
    killer.start()
    try:
        outcomes = workers.run([{"n": i, "sleep": 0.03} for i in range(90)])
    finally:
        over.set()
        killer.join()
    assert numbers(outcomes) == list(range(90))
    assert sum(hits.values()) > 2
    for worker in filter(lambda worker: worker.ready, workers._workers):  # and while nobody looks
        end(worker.process.pid)
    assert numbers(workers.run([{"n": i} for i in range(6)])) == list(range(6))


def test_from_many_threads():
    workers = make(size=2)
    results = {}

    def work(k):
        results[k] = numbers(workers.run([{"n": (k, i)} for i in range(20)]))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [[k, i] for i in range(20)] for k in range(8)}
    # started by a thread that has ended since, and alive
    assert all(worker.process.poll() is None for worker in workers._workers)


ODD = {
    "no JSON": "print('garbage', flush=True)",
    "no object": "print('3', flush=True)",
    "two answers": "print('{}\\n{}', flush=True)",
    "no end": "[print('x' * (1 << 20), end='', flush=True) for _ in range(20)]",
    "no output any more": "os.close(0); os.close(1); time.sleep(60)",
    "half an answer": "print('{', end='', flush=True); os._exit(0)",
}


@pytest.mark.parametrize("oddity", ODD)
def test_a_worker_that_breaks_the_protocol_breaks_nothing_else(oddity, monkeypatch):
    monkeypatch.setattr(process, "PATIENCE", 1.0)
    odd = f"""
import os, sys, time
print('{{"ready": true}}', flush=True)
for line in sys.stdin:
    if 'odd' in line:
        {ODD[oddity]}
    else:
        print('{{"fine": true}}', flush=True)
"""
    workers = make(size=1, timeout=20.0, worker=odd, shut_in=False)
    outcomes = workers.run([{"n": 1}, {"odd": 1}, {"n": 2}, {"n": 3}])
    assert statuses(outcomes) == ["ok", "crashed", "ok", "ok"]
    assert outcomes[2].value == {"fine": True}


def test_workers_are_replaced_when_they_are_old_or_were_out_of_memory(monkeypatch):
    monkeypatch.setattr(pool, "_MOST_TASKS", 5)
    workers = make(size=1)
    assert numbers(workers.run([{"n": i} for i in range(20)])) == list(range(20))
    assert workers._workers[0].tasks <= 5
    monkeypatch.setattr(pool, "_MOST_TASKS", 5000)
    held = [outcome.value["held"] for outcome in make(size=1).run([{"hoard": True} for _ in range(9)])]
    assert held == [1, 2, 3, 4, 1, 2, 3, 4, 1]


def test_a_batch_has_an_end_whatever_its_workers_do(monkeypatch):
    workers = make(size=1, timeout=0.3, shut_in=False)
    workers.run([{"n": 0}])  # so that the first task meets a worker that is ready
    # Those that replace it are not ready in time. Four in a row would end the batch with an error: after
    # 0.3 + 4 * 0.8 seconds at least, and its deadline is after 2 * (2 * 0.3 + 0.8).
    workers.command[-2] = "import time\ntime.sleep(600)"
    monkeypatch.setattr(pool, "_STARTUP_SECONDS", 0.8)
    began = time.monotonic()
    outcomes = workers.run([{"sleep": 60}] * 2)
    assert time.monotonic() - began < 25
    assert statuses(outcomes) == ["timeout", "late"]
    assert outcomes[-1].failed


def test_a_worker_is_shut_in(tmp_path, monkeypatch):
    workers = make()
    monkeypatch.setenv("HF_TOKEN", "secret")
    names = "sorted(name for name in os.environ if 'TOKEN' in name or 'KEY' in name)"
    outcomes = workers.run([{"code": names}, {"code": "open('mine', 'w').write('x')"}])
    assert [outcome.value for outcome in outcomes] == [{"value": "[]"}, {"value": "1"}]
    codes = f"open({str(tmp_path / 'x')!r}, 'w')", "socket.create_connection(('127.0.0.1', 1))"
    written, connected = (outcome.value.get("error", "") for outcome in workers.run([{"code": code} for code in codes]))
    assert "Error" in written or not isolation().writes
    assert ("Error" in connected and "refused" not in connected) or not isolation().network


END = """
import os, sys, signal, threading
sys.path.insert(0, {root!r})
from tests.rewards.workers.test_pool import make, processes
pool = make(size=2)
pool.run([{{"n": i}} for i in range(4)])
print(*(pid for worker in pool._workers if worker.ready for pid in processes(worker)), flush=True)
if {how!r} == "while grading":
    threading.Thread(target=pool.run, args=([{{"sleep": 100}}] * 2,), daemon=True).start()
    import time; time.sleep(0.3)
if {how!r} == "raise":
    raise ValueError
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["raise", "kill", "while grading"])
def test_nothing_outlives_the_trainer(how, tmp_path):
    code = END.format(root=str(ROOT), how=how)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) > 1, done.stderr  # one may have done all before the other was ready
    wait_until(lambda: all(map(gone, pids)) and not list(tmp_path.glob("basis_rl_worker_*")))


def test_starts_that_all_fail_end_the_run_and_those_that_fail_now_and_then_do_not(tmp_path, monkeypatch):
    with pytest.raises(RewardInfrastructureError, match=r"(?s)4 attempts failed.*no such module"):
        make(worker="raise SystemExit('no such module')", shut_in=False).run([{"n": 1}])
    log = tmp_path / "starts"
    code = f"import os, sys\nopen({str(log)!r}, 'a').write('x')\nif os.path.getsize({str(log)!r}) % 3: sys.exit(1)\n"
    monkeypatch.setattr(pool, "_MOST_TASKS", 1)
    workers = make(size=1, worker=code + WORKER, shut_in=False)  # six fail in all, but never four in a row
    assert numbers(workers.run([{"n": i} for i in range(3)])) == [0, 1, 2]
    assert log.stat().st_size == 9


@pytest.mark.parametrize("files", ["landlock 7", "landlock 1"])
def test_workers_need_no_namespaces(files, monkeypatch):
    if files not in isolation().mechanisms and files != "landlock 1":
        pytest.skip("an older kernel")
    given = Isolation(["rlimits", "no_new_privs", files, "seccomp"])
    monkeypatch.setattr("basis_rl.sandbox.policy.isolation", lambda: given)
    workers = make(cpu_timeout=0.5)
    outcomes = workers.run([{"burn": 100}, {"n": 1}, {"code": "os._exit(3)"}, {"code": "os.fork()"}])
    assert statuses(outcomes) == ["timeout", "ok", "crashed", "ok"]
    assert "BlockingIOError" in outcomes[3].value["error"]
    workers.run([{"n": 0}, {"n": 1}])
    launcher, *_, inside = processes(next(worker for worker in workers._workers if worker.ready))
    end(launcher)
    assert numbers(workers.run([{"n": i} for i in range(6)])) == list(range(6))
    wait_until(lambda: gone(inside))


def test_a_worker_that_dies_with_half_a_task_or_does_not_read_holds_up_nothing():
    # End of input and room in the socket arrive together: nothing must be written to one that is closed by then.
    dying = "import sys, time\nprint('{\"ready\": true}', flush=True)\nsys.stdin.read(1000)\ntime.sleep(0.05)\n"
    outcomes = make(worker=dying, shut_in=False).run([{"answer": "x" * 1_000_000} for _ in range(8)])
    assert statuses(outcomes) == ["crashed"] * 8
    deaf = "import time\nprint('{\"ready\": true}', flush=True)\ntime.sleep(60)\n"
    began = time.perf_counter()
    assert make(worker=deaf, shut_in=False, timeout=0.5).run([{"answer": "x" * 1_000_000}])[0].status == "timeout"
    assert time.perf_counter() - began < 20


def test_a_batch_that_is_broken_off_leaves_no_answers_to_the_next_one():
    workers = make(size=2)
    with pytest.raises(TypeError):
        workers.run([{"n": 1, "sleep": 0.3}, {"n": object()}])
    assert numbers(workers.run([{"n": 2}, {"n": 3}])) == [2, 3]


def test_a_batch_that_is_over_its_budget_is_no_failure_and_the_next_one_has_its_own():
    workers = make(size=2, cpu_timeout=30.0)
    workers.run([{"n": 0}])
    began = time.monotonic()
    outcomes = workers.run([{"n": 0}, *[{"sleep": 20}] * 6], seconds=0.8)
    assert time.monotonic() - began < 10
    assert statuses(outcomes) == ["ok", *["over_budget"] * 6]
    assert not any(outcome.failed for outcome in outcomes)
    assert numbers(workers.run([{"n": 5}, {"n": 6}], seconds=60.0)) == [5, 6]


def test_a_worker_that_waits_for_work_is_not_asleep_over_a_task():
    workers = make(size=1, cpu_timeout=0.05, shut_in=False)
    workers.run([{"n": 0}])
    first = workers._workers[0]
    time.sleep(1.1)  # a task that slept so long would be ended by the worker's own clock
    assert first.process.poll() is None
