"""Graders and sandboxed programs while CUDA is in use: verdicts are correct, and no process of theirs holds the GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.registry import build_reward
from benchmarks.gpu.stage import Findings

GOLDS = ["\\frac{1}{2}", "x+1", "12", "\\sqrt{2}"]
ANSWERS = ["0.5", "1+x", "13", "2^{1/2}"]  # right, right, wrong, right
EXPECTED = [1.0, 1.0, 0.0, 1.0]
PROGRAM = "```python\ndef double(x):\n    return 2 * x\n```"
TESTS = '{"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}'


def holders_of_the_gpu() -> list[str]:
    """Descendants of this process that have a file of the GPU's driver open or mapped."""
    holders = []
    for child in psutil.Process().children(recursive=True):
        try:
            links = [os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
            mapped = Path(f"/proc/{child.pid}/maps").read_text()
        except OSError:  # it has ended, or we may not read it
            continue
        if "/dev/nvidia" in mapped or any(link.startswith("/dev/nvidia") for link in links):
            holders.append(f"{child.pid} {' '.join(child.cmdline())[:80]}")
    return holders


def graded(found: Findings, name: str, grade: Callable[[], Any], expected: list[float]) -> None:
    """Grade twice, since the first call starts the workers."""
    for attempt in ("first", "second"):
        began = time.perf_counter()
        scores = grade()
        found.figure(f"{name}, {attempt}: seconds", time.perf_counter() - began)
        found.check(f"{name}, {attempt}: verdicts", scores == expected, f"{scores}")


def run(found: Findings) -> None:
    """Grade after CUDA was initialised, while the GPU is computing."""
    size = 4096 if found.cuda else 64
    matrix = torch.randn(size, size, device=found.device)
    for _ in range(20 if found.cuda else 1):
        matrix = (matrix @ matrix) / size
    copies = 8
    answers, golds = [f"\\boxed{{{answer}}}" for answer in ANSWERS * copies], GOLDS * copies
    with found.part("mathematics"):
        mathematics = MathVerifyReward(num_workers=2, timeout=5.0)
        grade = partial(mathematics, prompts=golds, completions=answers, solution=golds)
        graded(found, "mathematics", grade, EXPECTED * copies)
    with found.part("programs"):
        try:
            programs = build_reward("code", {})
        except ValueError as error:  # this machine cannot isolate programs
            found.figure("programs", f"not run: {error}")
        else:
            grade = partial(programs, prompts=[""] * 4, completions=[PROGRAM] * 4, solution=[TESTS] * 4)
            graded(found, "programs", grade, [1.0] * 4)
    holders = holders_of_the_gpu()
    found.check("no grader holds the GPU", not holders, "; ".join(holders))
    found.check("the GPU still computes", bool(torch.isfinite(matrix).all()))
