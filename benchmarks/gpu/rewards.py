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
from benchmarks.gpu.stage import Findings, Skipped

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
    """Grade twice, since the first call starts the workers; then look at the processes that did it."""
    for attempt in ("first", "second"):
        began = time.perf_counter()
        scores = grade()
        found.figure(f"{name}, {attempt}: seconds", time.perf_counter() - began)
        found.check(f"{name}, {attempt}: verdicts", scores == expected, f"{scores}")
    holders = holders_of_the_gpu()
    found.check(f"{name}: no grader holds the GPU", not holders, "; ".join(holders))


def mathematics(found: Findings) -> None:
    """Grade answers in mathematics."""
    copies = 8
    answers, golds = [f"\\boxed{{{answer}}}" for answer in ANSWERS * copies], GOLDS * copies
    reward = MathVerifyReward(num_workers=2, timeout=5.0)
    grade = partial(reward, prompts=golds, completions=answers, solution=golds)
    graded(found, "mathematics", grade, EXPECTED * copies)


def programs(found: Findings) -> None:
    """Run programs."""
    try:
        reward = build_reward("code", {})
    except ValueError as error:
        raise Skipped(f"this machine cannot isolate programs: {error}") from error
    grade = partial(reward, prompts=[""] * 4, completions=[PROGRAM] * 4, solution=[TESTS] * 4)
    graded(found, "programs", grade, [1.0] * 4)


def run(found: Findings) -> None:
    """Grade after CUDA was initialised, while the GPU is computing."""
    size = 4096 if found.cuda else 64
    matrix = torch.randn(size, size, device=found.device)
    for _ in range(20 if found.cuda else 1):
        matrix = (matrix @ matrix) / size
    for part in (mathematics, programs):
        found.attempt(part.__name__, part, found)
    found.check("the GPU still computes", bool(torch.isfinite(matrix).all()))
