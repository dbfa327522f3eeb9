"""Peak memory of real runs compared with the estimate of `basis-rl check`: at most 10 % off.

PyTorch counts the peak on a GPU only. On a CPU the runs and their estimates are made, but not compared.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import ModelConfig

from basis_rl.estimate.footprint import Launch, model_size, setting_of
from basis_rl.estimate.memory import memory_parts, peak
from benchmarks.gpu.runs import LARGE, SMALL, build_trainer, free, model_on, shape_on, train
from benchmarks.gpu.stage import Findings, need
from benchmarks.gpu.training import lora
from benchmarks.trainers import tokenizer

TOLERANCE = 0.10
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "0.2B": (SMALL, {}),
    "0.2B, checkpointed": (SMALL, {"gradient_checkpointing": True}),
    "0.2B, float32": (SMALL, {"bf16": False}),
    "0.2B, otb": (SMALL, {"side": "otb"}),
    "0.2B, LoRA": (SMALL, {"lora": True}),
    "0.6B, checkpointed": (LARGE, {"gradient_checkpointing": True}),
    "0.6B, checkpointed, 4,096 tokens": (LARGE, {"gradient_checkpointing": True, "max_completion_length": 4096}),
}


def case(found: Findings, shape: Any, settings: dict[str, Any]) -> tuple[float, float | None]:
    """Estimated and measured bytes of three steps; None are measured on a CPU."""
    chosen = {"max_completion_length": 1024, "per_device_train_batch_size": 4, **settings}
    side, adapter = chosen.pop("side", "grpo"), chosen.pop("lora", False)
    if not found.cuda:
        chosen["max_completion_length"] //= 128
    free()
    before = 0
    if found.cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model: Any = model_on(found.device, shape_on(found, shape), tokenizer())
    extra = {"peft_config": lora()} if adapter else {}
    trainer = build_trainer(side, model, found.folder / "memory", found.device, given=True, **chosen, **extra)
    train(found, trainer)
    measured = float(torch.cuda.max_memory_allocated() - before) if found.cuda else None
    config = trainer.model.config
    described = ModelConfig(
        model_name_or_path="benchmark", dtype="float32", use_peft=adapter, lora_r=8, lora_target_modules=["all-linear"]
    )
    prompt = max(len(ids) for ids in tokenizer()([f"{i} + 1 =" for i in range(64)])["input_ids"])
    setting = setting_of(trainer.args, described, config, Launch(), prompt)
    parts = memory_parts(model_size(config, described), setting)
    rollouts_are_given = [part for part in parts if part.phase != "generation"]
    del trainer, model
    free()
    return peak(rollouts_are_given), measured


def compare(found: Findings, name: str, shape: Any, settings: dict[str, Any]) -> None:
    """Compare a case's estimate with what was measured."""
    if settings.get("lora"):
        need("peft")
    estimated, measured = case(found, shape, settings)
    found.check(f"{name}: there is an estimate", estimated > 0)
    if measured is None:
        found.figure(name, {"estimated": estimated, "measured": None})
        return
    off = estimated / measured - 1
    found.figure(name, {"estimated": estimated, "measured": measured, "off": f"{off:+.1%}"})
    found.check(f"{name}: within {TOLERANCE:.0%}", abs(off) <= TOLERANCE, f"{off:+.1%} off")


def run(found: Findings) -> None:
    """Run all cases."""
    for name, (shape, settings) in CASES.items():
        found.attempt(name, compare, found, name, shape, settings)
