"""The loop of a worker process of `WorkerPool`: limits, the clock of CPU time, one answer per task.

A worker script loads it by its path, so that neither the package nor its folder get onto ``sys.path``, where
``math_verify.py`` would shadow the package of that name::

    serve_tasks = runpy.run_path(str(Path(__file__).with_name("serve_tasks.py")))["serve_tasks"]

The protocol: one JSON object a line in, one a line out, in turn. The first line out is ``{"ready": true}``.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Wall-clock limit of a task, as a multiple of its CPU time: it ends a worker that sleeps after its trainer has died.
_ASLEEP = 20.0


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
        start: runs before the first task and outside its limits; slow imports above all.
    """
    asked = os.fdopen(os.dup(0))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # A library that reads standard input must not get the next task, and one that prints must not write between
    # answers.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    # A worker that SIGPROF ends would otherwise leave a core dump where these are on.
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
        _clock(cpu_seconds)
        try:
            result = answer(task)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:200]}
        _clock(None)
        out.write(json.dumps(result) + "\n")


def _limit_memory(beyond: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + beyond
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _clock(cpu_seconds: float | None) -> None:
    """Start the timers of a task; None stops them."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds or 0)
    # If the trainer dies while this process sleeps, and no sandbox ends it, nobody else does.
    signal.setitimer(signal.ITIMER_REAL, _ASLEEP * (cpu_seconds or 0))
