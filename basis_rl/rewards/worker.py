"""The process that grades. Run as a script by `WorkerPool`; imports only `grading` of basis_rl, so that it starts fast.

One JSON object a line in, the arguments of `grade`, one a line out: ``{"gold": ..., "answer": ...}`` ->
``{"verdict": true | false | null}``, null when the gold itself cannot be parsed. The first line out is
``{"ready": true}``, after the imports.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any


def main(time_limit: float, memory_limit: int) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not end up between the verdicts
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script's path has the package only if installed
    from basis_rl.rewards.grading import grade

    grade("1", "1")
    out.write('{"ready": true}\n')
    for line in sys.stdin:
        task = json.loads(line)
        # If the trainer dies while this process hangs, nobody kills it: the default action of SIGALRM does.
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit)
        result: dict[str, Any]
        try:
            result = {"verdict": grade(**task)}
        except MemoryError:
            result = {"verdict": False, "error": "out of memory"}
        except Exception as error:
            result = {"verdict": False, "error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(time_limit=float(sys.argv[1]), memory_limit=int(sys.argv[2]))
