"""Graders and sandboxed programs while CUDA is in use: verdicts are correct, and no process of theirs holds the GPU."""

import os
import time
from pathlib import Path

import psutil
import pytest
import torch

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.registry import build_reward
from tests.support.tiny import DEVICE

pytestmark = pytest.mark.gpu
GOLDS = ["\\frac{1}{2}", "x+1", "12", "\\sqrt{2}"] * 8
ANSWERS = ["\\boxed{0.5}", "\\boxed{1+x}", "\\boxed{13}", "\\boxed{2^{1/2}}"] * 8
VERDICTS = [1.0, 1.0, 0.0, 1.0] * 8
PROGRAM = "```python\ndef double(x):\n    return 2 * x\n```"
PROGRAM_TESTS = '{"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}'


@pytest.fixture
def busy():
    """A matrix on the device, which is computing when the test begins."""
    size, rounds = (64, 1) if DEVICE == "cpu" else (4096, 20)
    matrix = torch.randn(size, size, device=DEVICE)
    for _ in range(rounds):
        matrix = (matrix @ matrix) / size
    yield matrix
    assert matrix.isfinite().all(), "the GPU still computes"


def holders_of(device):
    """Descendants of this process that have a file whose name begins with `device` open or mapped."""
    holders = []
    for child in psutil.Process().children(recursive=True):
        try:
            links = [os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
            mapped = Path(f"/proc/{child.pid}/maps").read_text()
        except OSError:  # it has ended, or we may not read it
            continue
        if device in mapped or any(link.startswith(device) for link in links):
            holders.append(f"{child.pid} {' '.join(child.cmdline())[:80]}")
    return holders


def grade_twice(reward, golds, answers, expected, record_property):
    """The first call starts the workers."""
    for attempt in ("first", "second"):
        began = time.perf_counter()
        scores = reward(prompts=golds, completions=answers, solution=golds)
        record_property(f"seconds, {attempt}", time.perf_counter() - began)
        assert scores == expected
    assert holders_of("/dev/nvidia") == []


def test_mathematics(busy, record_property):
    reward = MathVerifyReward(num_workers=2, timeout=5.0)
    grade_twice(reward, GOLDS, ANSWERS, VERDICTS, record_property)
    assert holders_of("/dev/null"), "the workers are seen, so one that holds the GPU would be"


def test_programs(busy, record_property):
    try:
        reward = build_reward("code", {})
    except ValueError as error:
        pytest.skip(f"this machine cannot isolate programs: {error}")
    grade_twice(reward, [PROGRAM_TESTS] * 4, [PROGRAM] * 4, [1.0] * 4, record_property)
