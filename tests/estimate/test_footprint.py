"""What DeepSpeed really holds on two ranks, against the arithmetic."""

import json

import pytest
import yaml
from transformers import Qwen3Config
from trl import ModelConfig

from basis_rl.estimate.footprint import model_size, read_launch, setting_of
from basis_rl.estimate.memory import memory_parts
from tests.support.ranks import ROOT, Launched
from tests.support.tiny import config
from tests.trainer.allotted import SHAPE

CONFIG = "accelerate_configs/zero3_cpu.yaml"


@pytest.mark.long
@pytest.mark.parametrize(("stage", "precision"), [(2, "no"), (3, "bf16")])
def test_zero_holds_what_the_estimate_says(stage, precision, tmp_path):
    pytest.importorskip("deepspeed")
    settings = yaml.safe_load((ROOT / CONFIG).read_text()) | {"mixed_precision": precision}
    settings["deepspeed_config"]["zero_stage"] = stage
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    Launched(tmp_path / "log", "tests.trainer.allotted", precision, tmp_path, config=tmp_path / "config.yaml").wait(600)
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
