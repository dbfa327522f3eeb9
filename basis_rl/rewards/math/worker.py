"""The process that grades. Run as a script by `WorkerPool`; loads only what it needs of basis_rl, by path.

The arguments of `basis_rl.rewards.math.grading.grade` in, ``{"verdict": true | false | null}`` out, null when the gold
itself cannot be parsed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def _load(path: Path, name: str) -> Any:
    return runpy.run_path(str(path))[name]


class _Grader:
    def start(self) -> None:
        self.grade = _load(_HERE / "grading.py", "grade")
        self.grade("1", "1")

    def answer(self, task: dict[str, Any]) -> dict[str, Any]:
        """A grading that fails, for want of memory too, is a wrong answer."""
        try:
            return {"verdict": self.grade(**task)}
        except Exception as error:
            return {"verdict": False, "error": f"{type(error).__name__}: {error}"[:200]}


if __name__ == "__main__":
    grader = _Grader()
    serve_tasks = _load(_HERE.parent / "workers" / "serve_tasks.py", "serve_tasks")
    serve_tasks(grader.answer, float(sys.argv[1]), int(sys.argv[2]), start=grader.start)
