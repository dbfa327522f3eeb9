"""The loop of a worker process of `WorkerPool`: limits, the clock of CPU time, one answer per task.

A worker script loads it by its path, so that neither the package nor its folder get onto ``sys.path``, where
``math_verify.py`` would shadow the package of that name::

    serve_tasks = runpy.run_path(str(Path(__file__).with_name("serve_tasks.py")))["serve_tasks"]

The protocol: one JSON object a line in, one a line out, in turn. The first line out is ``{"ready": true}``. What a task
has under ``"#"`` is in its answer too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_ASLEEP = 20.0
"""The multiple of its CPU time that a task may take by the clock, if no other process is left to end it."""


def serve_tasks(
    answer: Callable[[dict[str, Any]], dict[str, Any]],
    cpu_seconds: float | None = None,
    memory_bytes: int | None = None,
    start: Callable[[], object] | None = None,
) -> None:
    """Answer tasks from standard input until it ends.

    A task that takes more than `cpu_seconds` of CPU time is ended by SIGPROF, and this process with it: an exception
    would not reach a computation inside C code, and could leave a library in a state in which later answers are wrong.

    Args:
        answer: the answer to a task. What it raises is answered as ``{"error": ...}``.
        cpu_seconds: for one task, threads together; None: not limited here.
        memory_bytes: of address space, beyond what `start` has taken; None: not limited here.
        start: what takes long and need not count for the first task, imports above all.
    """
    asked, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    # What a library reads must not be the next task, and what it prints must not end up between the answers.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if start is not None:
        start()
    if memory_bytes is not None:
        _limit_memory(memory_bytes)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    out.write('{"ready": true}\n')
    for line in asked:
        task = json.loads(line)
        mark = {"#": task.pop("#")} if "#" in task else {}
        _clock(cpu_seconds)
        try:
            result = answer(task)
        except MemoryError:
            result = {"error": "out of memory"}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:200]}
        _clock(None)
        out.write(json.dumps({**result, **mark}) + "\n")


def serve_forks(
    answer: Callable[[dict[str, Any]], dict[str, Any]],
    cpu_seconds: float | None = None,
    start: Callable[[], object] | None = None,
) -> None:
    """Fork a worker for each order on standard input, a socket, until that ends: `basis_rl.rewards.workers.zygote`.

    An order is the number of a worker, with the descriptor of the socket that it is to serve; what comes back, when a
    worker has ended, is the number and its return code. Workers that need no memory of their own and no second process:
    each refuses itself new processes, and signals to others.

    Args:
        answer: as for `serve_tasks`.
        cpu_seconds: as for `serve_tasks`.
        start: what all workers have in common, imports above all.
    """
    orders = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    logging.disable(logging.CRITICAL)
    gc.disable()  # what `start` makes stays
    if start is not None:
        start()
    gc.collect()
    gc.enable()
    gc.freeze()  # a collection in a worker would write to every object, and so copy all of the shared memory
    _sandbox()[0].set_dumpable(False)  # nobody of the same user looks into it, a worker that is taken over least
    told, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    numbers: dict[int, int] = {}
    while True:
        select.select([orders.fileno(), told], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(told, 1 << 12)
        _report(orders, numbers)
        if not select.select([orders], [], [], 0)[0]:
            continue
        order, descriptors, _, _ = socket.recv_fds(orders, 64, 1)
        if not order:
            return
        pid = _fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            os.close(told)
            os.close(tell)
            _become_worker(descriptors[0], null, answer, cpu_seconds)
        os.close(descriptors[0])
        if pid is None:
            orders.send(json.dumps([int(order), 1]).encode())
        else:
            numbers[pid] = int(order)


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return None


def _report(orders: socket.socket, numbers: dict[int, int]) -> None:
    """Tell of the workers that have ended."""
    with contextlib.suppress(ChildProcessError, BrokenPipeError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] in numbers:
                code = os.waitstatus_to_exitcode(ended[1])
                orders.send(json.dumps([numbers.pop(ended[0]), code]).encode())


def _become_worker(
    end: int, null: int, answer: Callable[[dict[str, Any]], dict[str, Any]], cpu_seconds: float | None
) -> NoReturn:
    code = 1
    try:
        for target in (0, 1):
            os.dup2(end, target)
        os.dup2(null, 2)
        os.close(end)
        os.close(null)
        _refuse_itself()
        serve_tasks(answer, cpu_seconds)
        code = 0
    finally:
        os._exit(code)  # whatever happens: there is one zygote


def _sandbox() -> tuple[Any, Any]:
    """`basis_rl.sandbox`'s kernel and seccomp: the folder above the package, which holds anything, may not be read."""
    if "basis_rl" not in sys.modules:
        package = types.ModuleType("basis_rl")
        package.__path__ = [str(Path(__file__).parents[2])]
        sys.modules["basis_rl"] = package
    from basis_rl.sandbox import kernel, seccomp

    return kernel, seccomp


def _refuse_itself() -> None:
    """New processes, and signals to others: what the sandbox, which the zygote is in too, has to allow."""
    kernel, seccomp = _sandbox()
    refused = [seccomp.Refusal(name, error=11) for name in ("fork", "vfork", "clone")]  # 11: EAGAIN
    signals = ("tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
    refused += [seccomp.Refusal(name) for name in signals]
    refused.append(seccomp.Refusal("kill", ((0, 0xFFFFFFFF, "!=", os.getpid()),)))
    seccomp.install(seccomp.assemble(refused, kernel.MACHINE, os.getpid()))


def _limit_memory(beyond: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit, hard = pages * resource.getpagesize() + beyond, resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _clock(cpu_seconds: float | None) -> None:
    """Start it, or stop it (None)."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds or 0)
    # If the trainer dies while this process sleeps, and no sandbox ends it, nobody else does.
    signal.setitimer(signal.ITIMER_REAL, _ASLEEP * (cpu_seconds or 0))
