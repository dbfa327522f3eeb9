"""The stages of `python -m benchmarks.gpu` that start processes of their own pass on a CPU.

They are apart from the others so that two processes of pytest share them.
"""

import importlib.util

import pytest

from tests.benchmarks.test_gpu_stages import run


@pytest.mark.long
def test_sharding(tmp_path):
    figures = run(tmp_path, "sharding")["sharding"]
    assert set(figures) == {"zero2", "zero3", "fsdp2"}


@pytest.mark.long
def test_ranks(tmp_path):
    assert run(tmp_path, "ranks")["ranks"]["backend"] == ["gloo", "gloo"]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("stage", ["vllm", "server"])
def test_vllm(stage, tmp_path):
    assert "not run on a CPU" in run(tmp_path, stage)[stage]
