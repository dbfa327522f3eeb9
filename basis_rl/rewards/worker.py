"""The process that grades. Run as a script by `WorkerPool`; imports nothing of basis_rl, so that it starts fast.

One JSON object a line in, one a line out: ``{"gold": ..., "answer": ...}`` -> ``{"verdict": true | false | null}``,
null when the gold itself cannot be parsed. The first line out is ``{"ready": true}``, after the imports.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any


def grade(gold: str, answer: str) -> bool | None:
    from math_verify import parse, verify

    # Timeouts off: math_verify's own use SIGALRM handlers, which a computation inside C code outlives. The pool kills.
    expected = parse(rf"\boxed{{{gold}}}", parsing_timeout=None)
    if not expected:
        return None
    return bool(verify(expected, parse(rf"\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None))


def main(time_limit: float, memory_limit: int) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not end up between the verdicts
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grade("1", "1")
    out.write('{"ready": true}\n')
    for line in sys.stdin:
        task = json.loads(line)
        # If the trainer dies while this process hangs, nobody kills it: the default action of SIGALRM does.
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit)
        result: dict[str, Any]
        try:
            result = {"verdict": grade(task["gold"], task["answer"])}
        except MemoryError:
            result = {"verdict": False, "error": "out of memory"}
        except Exception as error:
            result = {"verdict": False, "error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(time_limit=float(sys.argv[1]), memory_limit=int(sys.argv[2]))
