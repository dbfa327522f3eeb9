"""Peak memory of real runs compared with the estimate of `basis-rl check`: at most 10 % off.

PyTorch counts the peak on a GPU only. On a CPU one run and its estimate are made, but not compared.
"""

import pytest
import torch
from trl import ModelConfig

from basis_rl.estimate.footprint import Launch, model_size, setting_of
from basis_rl.estimate.memory import memory_parts, peak
from benchmarks.gpu.runs import LARGE, SMALL, build_trainer, free, model_on
from benchmarks.trainers import tokenizer
from tests.support.tiny import DEVICE

pytestmark = pytest.mark.gpu
TOLERANCE = 0.10
CASES = {
    "0.2B": (SMALL, {}),
    "0.2B, checkpointed": (SMALL, {"gradient_checkpointing": True}),
    "0.2B, float32": (SMALL, {"bf16": False}),
    "0.2B, otb": (SMALL, {"side": "otb"}),
    "0.2B, LoRA": (SMALL, {"lora": True}),
    "0.6B, checkpointed": (LARGE, {"gradient_checkpointing": True}),
    "0.6B, checkpointed, 4,096 tokens": (LARGE, {"gradient_checkpointing": True, "max_completion_length": 4096}),
}
if DEVICE == "cpu":
    CASES = {"0.2B, LoRA": CASES["0.2B, LoRA"]}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_as_estimated(case, tmp_path, record_property):
    shape, settings = CASES[case]
    settings = {"max_completion_length": 1024, "per_device_train_batch_size": 4, **settings}
    side, adapter = settings.pop("side", "grpo"), settings.pop("lora", False)
    if adapter:
        peft = pytest.importorskip("peft")
        settings["peft_config"] = peft.LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
    if DEVICE == "cpu":
        settings["max_completion_length"] //= 128
    else:
        free()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    trainer = build_trainer(side, model_on(DEVICE, shape), tmp_path, DEVICE, given=True, **settings)
    trainer.train()
    assert trainer.state.global_step == 3
    described = ModelConfig(
        model_name_or_path="benchmark", dtype="float32", use_peft=adapter, lora_r=8, lora_target_modules=["all-linear"]
    )
    config = trainer.model.config
    prompt = max(len(ids) for ids in tokenizer()(trainer.train_dataset["prompt"][:])["input_ids"])
    parts = memory_parts(model_size(config, described), setting_of(trainer.args, described, config, Launch(), prompt))
    estimated = peak([part for part in parts if part.phase != "generation"])  # rollouts are given
    record_property("estimated bytes", estimated)
    assert estimated > 0
    if DEVICE != "cpu":
        measured = torch.cuda.max_memory_allocated() - before
        record_property("measured bytes", measured)
        assert estimated == pytest.approx(measured, rel=TOLERANCE)
