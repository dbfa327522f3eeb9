"""The process that grades. Run as a script by `WorkerPool`; loads only what it needs of basis_rl, by path.

The arguments of `basis_rl.rewards.math.grading.grade` in, ``{"verdict": true | false | null}`` out, null when the gold
itself cannot be parsed; or ``{"error": ...}``, for want of memory too.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_loaded: dict[str, Any] = {}


def start() -> None:
    """The imports, those that the first grading makes among them."""
    _loaded.update(runpy.run_path(str(_HERE / "grading.py")))
    _loaded["grade"]("1", "1")


if __name__ == "__main__":
    serve_tasks = runpy.run_path(str(_HERE.parent / "workers" / "serve_tasks.py"))["serve_tasks"]
    serve_tasks(lambda task: {"verdict": _loaded["grade"](**task)}, float(sys.argv[1]), start=start)
