"""The stages of `python -m benchmarks.gpu` that work in one process pass on a CPU, so that they cannot rot."""

import json

import pytest

from benchmarks.gpu import __main__ as command

QUICK = ["tests", "resume", "rewards", "selection"]


def run(folder, *stages):
    """The figures of stages that pass."""
    done = command.main(["--cpu", "--output", str(folder), "--stages", *stages])
    assert {name: done[name]["status"] for name in stages} == dict.fromkeys(stages, "passed")
    assert all(part["status"] == "passed" for name in stages for part in done[name]["parts"].values())
    (results,) = folder.glob("cpu_*.json")
    assert json.loads(results.read_text())["device"] == "cpu"
    return {name: done[name]["figures"] for name in stages}


@pytest.mark.long
def test_quick_stages(tmp_path):
    figures = run(tmp_path, *QUICK)
    assert figures["tests"]["tests"] == {"passed": 11, "failed": 0, "skipped": 0}
    assert figures["resume"]["ppo: largest difference of a weight"] == 0.0


@pytest.mark.long
def test_training(tmp_path):
    figures = run(tmp_path, "training")["training"]
    assert figures["float32: gradient, relative difference to TRL's"] < 1e-4
    assert len([name for name in figures if name.startswith("run: ")]) == 9


@pytest.mark.long
def test_times_and_memory(tmp_path):
    figures = run(tmp_path, "time", "memory", "overhead")
    assert figures["overhead"]["steps, 8 tokens: added to `none`"]["none"] == "+0.0%"
    assert figures["memory"]["0.2B, LoRA"]["estimated"] > 0
    assert figures["memory"]["0.2B, LoRA"]["measured"] is None, "PyTorch counts on a GPU only"
