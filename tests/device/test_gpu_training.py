"""Training steps in bfloat16: several baselines, LoRA, ways to generate; losses and gradients compared with TRL's."""

import dataclasses
import importlib.util
import math

import pytest

from benchmarks.gpu.runs import build_trainer, free, model_on
from benchmarks.trainers import TRL
from tests.device.test_gpu_resume import deterministic
from tests.support.tiny import DEVICE, TracedBasis, TracedTrl, flat

pytestmark = pytest.mark.gpu
# Relative to TRL's losses and gradients. In float32 only the order of sums differs; in bfloat16, rounding the last bit
# of the advantage changes the gradient by 2^-8.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}


@pytest.mark.parametrize("precision", TOLERANCES)
def test_rollouts_losses_and_gradients_are_trls(precision, tmp_path, record_property):
    """Of two steps."""
    traces, texts = {}, {}
    for side, cls in ((TRL, TracedTrl), ("grpo", TracedBasis)):
        settings = {"bf16": precision == "bfloat16", "max_steps": 2, "log_completions": False}
        with deterministic():
            trainer = build_trainer(side, model_on(DEVICE), tmp_path, DEVICE, cls=cls, **settings)
            trainer.train()
        traces[side], texts[side] = trainer.trace, list(trainer._logs["completion"])
        del trainer
        free()
    ours, theirs = traces["grpo"], traces[TRL]
    assert texts["grpo"] == texts[TRL]
    # The loss of a step is about 0, as the advantages of its groups are on average.
    assert all(gradient.any() for _, gradient in theirs)
    assert all(math.isfinite(loss) and gradient.isfinite().all() for loss, gradient in [*ours, *theirs])
    losses = max(abs(a - b) / max(abs(b), 1e-3) for (a, _), (b, _) in zip(ours, theirs, strict=True))
    gradients = max(float((a - b).norm() / b.norm()) for (_, a), (_, b) in zip(ours, theirs, strict=True) if b.any())
    record_property("loss, relative difference to TRL's", losses)
    record_property("gradient, relative difference to TRL's", gradients)
    assert losses <= TOLERANCES[precision]
    assert gradients <= TOLERANCES[precision]


def little_memory():
    """Settings of continuous batching: a part of the memory, and attention that needs no download."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    # By default it would take nearly all of a CPU's memory.
    chosen = {"num_blocks": 32, "max_batch_tokens": 256} if DEVICE == "cpu" else {"max_memory_percent": 0.2}
    if importlib.util.find_spec("flash_attn") is None and importlib.util.find_spec("flash_attn_interface") is None:
        chosen["auto_switch_to_flash"] = False  # with the package `kernels`, transformers would fetch it from the Hub
    return {key: value for key, value in chosen.items() if key in known}


RUNS = {
    "basis": {"num_generations": 1},
    **{side: {} for side in ("grpo", "otb", "ppo", "remax", "bv_blend")},
    "grpo, LoRA": {"lora": True, "learning_rate": 1e-2},
    "otb, checkpointed": {"gradient_checkpointing": True},
    "rloo, continuous batching": {"use_transformers_continuous_batching": True},
}
if DEVICE == "cpu":
    # On a CPU tests/trainer has every baseline.
    RUNS = {run: RUNS[run] for run in ("ppo", "grpo, LoRA", "rloo, continuous batching")}


@pytest.mark.parametrize("run", RUNS)
def test_three_steps_are_finite_and_change_the_policy(run, tmp_path, record_property):
    settings = dict(RUNS[run])
    if settings.pop("lora", False):
        peft = pytest.importorskip("peft")
        settings["peft_config"] = peft.LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
    if "use_transformers_continuous_batching" in settings:
        settings["transformers_continuous_batching_config"] = little_memory()
    tokens = 8 if DEVICE == "cpu" else 32
    side = run.split(",")[0]
    trainer = build_trainer(side, model_on(DEVICE), tmp_path, DEVICE, max_completion_length=tokens, **settings)
    before = flat(p for p in trainer.model.parameters() if p.requires_grad).cpu()
    trainer.train()
    after = flat(p for p in trainer.model.parameters() if p.requires_grad).cpu()
    losses, norms, entropies = (
        [row[key] for row in trainer.state.log_history if key in row] for key in ("loss", "grad_norm", "entropy")
    )
    record_property("loss", losses)
    record_property("grad_norm", norms)
    record_property("entropy", entropies)
    assert len(losses) == 3
    assert all(map(math.isfinite, [*losses, *norms]))
    assert max(norms) > 0
    assert after.isfinite().all()
    assert not after.equal(before)
    if trainer._critic is not None:
        parameters = trainer._critic.parameters
        assert {p.device.type for p in parameters} == {DEVICE}
        assert any(bool(p.any()) for p in parameters), "its last layer starts at 0"
