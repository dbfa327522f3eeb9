"""A resumed run is bit-identical to the uninterrupted one under deterministic algorithms."""

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.runs import build_trainer, free, model_on
from tests.support.tiny import DEVICE

pytestmark = pytest.mark.gpu
# Each batch is used in two steps, so the checkpoint of step 3 is in the middle of a batch.
SHAPE = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 4}
# On a CPU tests/trainer/test_resume.py has every baseline.
RUNS = [("ppo", False)] if DEVICE == "cpu" else [("basis_history", False), ("ppo", False), ("basis_history", True)]


@contextmanager
def deterministic(strict=False):
    """Deterministic algorithms; yields a set of the operations for which PyTorch has none, and which it used.

    With `strict`, which is what a user would set, such an operation is an error. Otherwise PyTorch warns, and keeps the
    faster backward passes of attention, which are not deterministic; so attention is computed by matrix products.
    """
    without = set()
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        with warnings.catch_warnings(record=True) as caught, nullcontext() if strict else sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("always")
            yield without
        without |= {str(each.message).split(".")[0] for each in caught if "deterministic" in str(each.message)}
    finally:
        torch.use_deterministic_algorithms(False)


def trained(folder, baseline, strict, **settings):
    """The weights, including the critic's, and what was logged."""
    resume = settings.pop("resume", None)
    with deterministic(strict) as without:
        trainer = build_trainer(baseline, model_on(DEVICE), folder, DEVICE, **SHAPE, **settings)
        trainer.train(resume_from_checkpoint=resume)
    weights = {name: p.detach().cpu() for name, p in trainer.model.state_dict().items()}
    if trainer._critic is not None:
        weights |= {f"critic.{name}": p.detach().cpu() for name, p in trainer._critic.module.state_dict().items()}
    logs = [[row[key] for key in ("loss", "grad_norm", "reward") if key in row] for row in trainer.state.log_history]
    del trainer
    free()
    return weights, logs, without


@pytest.mark.parametrize(("baseline", "strict"), RUNS)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(baseline, strict, tmp_path, record_property):
    folder = tmp_path / "whole"
    try:
        whole, logs, without = trained(folder, baseline, strict, save_strategy="steps", save_steps=3)
    except RuntimeError as error:
        if not strict or "deterministic" not in str(error):
            raise
        pytest.skip(f"PyTorch refuses: {str(error).splitlines()[0]}")
    record_property("operations without a deterministic algorithm", sorted(without))
    again, logs_again, _ = trained(tmp_path / "again", baseline, strict, resume=str(folder / "checkpoint-3"))
    assert whole.keys() == again.keys()
    assert [key for key in whole if not torch.equal(whole[key], again[key])] == []
    assert logs == logs_again
