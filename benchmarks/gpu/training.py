"""Training steps in bfloat16: several baselines, LoRA, ways to generate; losses and gradients compared with TRL's."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from basis_rl import BasisTrainer
from benchmarks.gpu.runs import build_trainer, deterministic, flat, free, logged, model_on, relative, shape_on, train
from benchmarks.gpu.stage import Findings, need
from benchmarks.trainers import TRL, tokenizer

# Relative to TRL's losses and gradients. In float32 only the order of sums differs; in bfloat16, rounding the last bit
# of the advantage changes the gradient by 2^-8.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}
SIDES: dict[str, dict[str, Any]] = {
    "basis": {"num_generations": 1}, "grpo": {}, "otb": {}, "ppo": {}, "remax": {}, "bv_blend": {},
}  # fmt: skip


class Recording:
    """Records loss and gradient of each backward pass, where the model is: copying them to the host takes longer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.trace: list[tuple[float, Tensor]] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        """One micro-batch."""
        before = self._gradient(model)
        loss: Tensor = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        self.trace.append((float(loss), self._gradient(model) - before))
        return loss

    @staticmethod
    def _gradient(model: Any) -> Tensor:
        return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


class RecordingTrl(Recording, GRPOTrainer):
    """TRL's trainer, recording."""


class RecordingBasis(Recording, BasisTrainer):
    """Our trainer, recording."""


def against_trl(found: Findings, precision: str) -> None:
    """Compare sampled rollouts, losses and gradients of four micro-batches of both trainers."""
    traces, texts = {}, {}
    for side, cls in ((TRL, RecordingTrl), ("grpo", RecordingBasis)):
        model = model_on(found.device, shape_on(found), tokenizer())
        settings: dict[str, Any] = {"bf16": precision == "bfloat16", "max_steps": 2, "log_completions": False}
        with deterministic():
            trainer = build_trainer(side, model, found.folder / "trl", found.device, cls=cls, **settings)
            train(found, trainer)
        traces[side], texts[side] = trainer.trace, list(trainer._logs["completion"])
        del trainer, model
        free()
    ours, theirs = traces["grpo"], traces[TRL]
    found.check(f"{precision}: the rollouts are TRL's", texts["grpo"] == texts[TRL])
    found.check(f"{precision}: losses are not all 0", any(abs(loss) > 1e-5 for loss, _ in theirs))
    numbers = [
        number for side in traces.values() for loss, gradient in side for number in (loss, float(gradient.norm()))
    ]
    found.check(f"{precision}: losses and gradients are finite", all(map(math.isfinite, numbers)))
    losses = max(abs(a - b) / max(abs(b), 1e-3) for (a, _), (b, _) in zip(ours, theirs, strict=True))
    gradients = max(relative(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True) if float(b.norm()) > 0)
    for name, value in (("loss", losses), ("gradient", gradients)):
        found.figure(f"{precision}: {name}, relative difference to TRL's", value)
        found.check(f"{precision}: {name} as TRL's", value <= TOLERANCES[precision], f"{value:.2e} off")


def short_run(found: Findings, name: str, side: str, **settings: Any) -> None:
    """Check that three steps are finite and change the policy."""
    model = model_on(found.device, shape_on(found), tokenizer())
    tokens = 32 if found.cuda else 8
    trainer = build_trainer(side, model, found.folder / "short", found.device, max_completion_length=tokens, **settings)
    before = flat(p for p in trainer.model.parameters() if p.requires_grad).cpu()
    seconds = train(found, trainer)
    after = flat(p for p in trainer.model.parameters() if p.requires_grad).cpu()
    losses, norms = logged(trainer, "loss"), logged(trainer, "grad_norm")
    rows = {"seconds": seconds, "loss": losses, "grad_norm": norms, "entropy": logged(trainer, "entropy")}
    found.figure(f"run: {name}", rows)
    found.check(f"{name}: three finite steps", len(losses) == 3 and all(map(math.isfinite, [*losses, *norms])))
    found.check(f"{name}: there is a gradient", max(norms, default=0.0) > 0)
    found.check(f"{name}: the policy changes, and is finite", bool(after.isfinite().all()) and not after.equal(before))
    if trainer._critic is not None:
        found.check(f"{name}: the critic learns on the device", critic_learns(trainer, found.device))
    del trainer, model
    free()


def critic_learns(trainer: Any, device: str) -> bool:
    """Whether the critic is on the policy's device, and its last layer, which starts at 0, is no longer 0."""
    parameters = trainer._critic.parameters
    return all(p.device.type == device for p in parameters) and any(float(p.abs().max()) > 0 for p in parameters)


def lora() -> Any:
    """An adapter of rank 8 on all layers."""
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")


def little_memory(found: Findings) -> dict[str, Any]:
    """Settings of continuous batching: a part of the memory, and attention that needs no download."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    chosen: dict[str, Any] = {"num_blocks": 32, "max_batch_tokens": 256}  # by default nearly all of a CPU's memory
    if found.cuda:
        chosen = {"max_memory_percent": 0.2}
    if importlib.util.find_spec("flash_attn") is None and importlib.util.find_spec("flash_attn_interface") is None:
        chosen["auto_switch_to_flash"] = False  # with the package `kernels`, transformers would fetch it from the Hub
    return {key: value for key, value in chosen.items() if key in known}


def with_lora(found: Findings, name: str) -> None:
    """Train an adapter."""
    need("peft")
    short_run(found, name, "grpo", peft_config=lora(), learning_rate=1e-2)


def run(found: Findings) -> None:
    """Run all parts; an error in one does not stop the others."""
    for precision in ("float32", "bfloat16"):
        found.attempt(f"against TRL, {precision}", against_trl, found, precision)
    for side, settings in SIDES.items():
        found.attempt(f"run, {side}", short_run, found, side, side, **settings)
    found.attempt("run, LoRA", with_lora, found, "grpo, LoRA")
    found.attempt(
        "run, gradient checkpointing", short_run, found, "otb, checkpointed", "otb", gradient_checkpointing=True
    )
    found.attempt(
        "run, continuous batching", short_run, found, "rloo, continuous batching", "rloo",
        use_transformers_continuous_batching=True, transformers_continuous_batching_config=little_memory(found),
    )  # fmt: skip
