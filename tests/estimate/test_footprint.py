"""What DeepSpeed really holds on two ranks, against the arithmetic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config
from trl import ModelConfig

from basis_rl.estimate.footprint import model_size, read_launch, setting_of
from basis_rl.estimate.memory import memory_parts
from tests.support.tiny import config
from tests.trainer.allotted import SHAPE

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "accelerate_configs/zero3_cpu.yaml"


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_zero_holds_what_the_estimate_says(stage, precision, tmp_path):
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIG, "--zero_stage", str(stage)]
    command += ["--mixed_precision", precision, "--main_process_port", "0"]
    command += ["-m", "tests.trainer.allotted", precision, str(tmp_path)]
    environment = {**os.environ, "CI": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    launch = read_launch(str(ROOT / CONFIG))
    assert (launch.engine, launch.stage, launch.world) == ("deepspeed", 3, 2)
    model, model_config = ModelConfig(model_name_or_path="m"), Qwen3Config(**SHAPE)
    args = config(tmp_path, bf16=precision == "bf16")
    launch = type(launch)(launch.world, launch.engine, stage)
    parts = memory_parts(model_size(model_config, model), setting_of(args, model, model_config, launch, 8))
    estimate = {part.name: part.bytes for part in parts}
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert ("gradients" in found) == (stage == 3), "ZeRO-2 gives them up in the step"
        assert found == {name: estimate.get(name, 0) for name in found}
