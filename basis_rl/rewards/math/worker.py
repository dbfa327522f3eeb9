"""The process that grades. Run as a script by `WorkerPool`; loads only what it needs of basis_rl, by path.

The arguments of `basis_rl.rewards.math.grading.grade` in, ``{"verdict": ...}`` out, in its words; or ``{"error":
...}``, also if memory runs out.

With ``text``, that of a rollout, and ``gold`` the verdict is Math-Verify's own.
"""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

_HERE = Path(__file__).parent
_loaded: dict[str, Any] = {}
# Of CPU time, for what has time limits of its own: 5 s by the clock for each of two texts and four comparisons.
_PLAIN_SECONDS = 40.0
# Of Math-Verify's own verdicts.
_WORDS = {True: "right", False: "unequal", None: "no_gold"}

# Of each kind one: the tables by which ANTLR parses are built as they are needed, for a second and more of CPU time.
_KINDS = (
    ("1", "1"), ("1,000", "5.50"), (r"\frac{1}{2}", r"-\dfrac{3}{4}"), ("x^2-1", "(x-1)(x+1)"), ("x=5", "y = 2x + 3"),
    (r"2\sqrt{3}+1", r"3\sqrt[3]{2}"), ("(1,2)", r"\left(\frac{\pi}{2},-3\right)"), (r"\{1,2\}", "1, 2"),
    (r"x\le 5", r"(-\infty,5]"), (r"[1,2)\cup(3,\infty)", r"x \in (1,2)"), (r"\text{east}", "B"), (r"50\%", r"\$5"),
    (r"90^\circ", r"5\text{ cm}"), ("11_2", "6 - 5i"), (r"1 \pm \sqrt{19}", r"2\frac{1}{3}"), ("|x|", "3:2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} x \\ y \end{pmatrix}"), (r"5!", r"\binom{5}{2}"),
    (r"\cot x", r"\sin^2 x+\cos(2x)"), (r"\log_2 5", r"\ln(3)e^{x}"), ("x_1+y_{2}", r"3 \cdot 10^{8}"),
    (r"\left[-\frac{1}{2}, \frac{3}{4}\right]", "[2,5)"), ("(-3,-4)", r"(-\frac{1}{2}, 2\sqrt{3})"),
    ("4x^3(7x^2-1)", r"3\cdot(1-x)(1+x)"), (r"\frac{5\pi}{4}", "a(a+2)"), ("-1 + 7i, -1 - 7i", "2a+b"),
    (r"y=-\frac{3}{2}x-\frac{7}{4}", "x^2+bx+c"),
)  # fmt: skip


def start() -> None:
    """The imports, those that the first grading makes among them, and the tables of the parser."""
    # grading.py finds its module without the packages around it.
    latex = SimpleNamespace(**runpy.run_path(str(_HERE / "latex.py")))
    cast(dict[str, Any], sys.modules)["basis_rl.rewards.math.latex"] = latex
    _loaded.update(runpy.run_path(str(_HERE / "grading.py")))
    for gold, answer in _KINDS:
        _loaded["grade"](gold, answer)


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """What is asked of one pair, or of one rollout."""
    if "text" in task:
        signal.setitimer(signal.ITIMER_PROF, _PLAIN_SECONDS)
        return {"verdict": _WORDS[_loaded["plain_verdict"](task["gold"], task["text"])]}
    return {"verdict": _loaded["grade"](**task)}


if __name__ == "__main__":
    serve_tasks = runpy.run_path(str(_HERE.parent / "workers" / "serve_tasks.py"))["serve_tasks"]
    serve_tasks(answer, float(sys.argv[1]), start=start)
