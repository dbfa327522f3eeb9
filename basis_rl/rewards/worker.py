"""The process that grades. Run as a script by `WorkerPool`; imports nothing of basis_rl, so that it starts fast.

``{"gold": ..., "answer": ...}`` -> ``{"verdict": true | false | null}``, null when the gold itself cannot be parsed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any


def grade(gold: str, answer: str) -> bool | None:
    from math_verify import parse, verify

    # Timeouts off: math_verify's own use SIGALRM handlers, which a computation inside C code outlives. The pool kills.
    expected = parse(rf"\boxed{{{gold}}}", parsing_timeout=None)
    if not expected:
        return None
    return bool(verify(expected, parse(rf"\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None))


def answer_task(task: dict[str, Any]) -> dict[str, Any]:
    """A grading that fails, for want of memory too, is a wrong answer."""
    try:
        return {"verdict": grade(task["gold"], task["answer"])}
    except Exception as error:
        return {"verdict": False, "error": f"{type(error).__name__}: {error}"[:200]}


if __name__ == "__main__":
    serve_tasks = runpy.run_path(str(Path(__file__).with_name("serve_tasks.py")))["serve_tasks"]
    serve_tasks(answer_task, float(sys.argv[1]), int(sys.argv[2]), start=lambda: grade("1", "1"))
