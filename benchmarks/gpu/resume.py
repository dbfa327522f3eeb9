"""A resumed run is bit-identical to the uninterrupted one under deterministic algorithms."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.runs import build_trainer, deterministic, free, logged, model_on, shape_on, train
from benchmarks.gpu.stage import Findings
from benchmarks.trainers import tokenizer

# Each batch is used in two steps, so the checkpoint of step 3 is in the middle of a batch.
SHAPE: dict[str, Any] = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 4}


def trained(
    found: Findings, baseline: str, resumed: bool, strict: bool
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The weights, including the critic's, and the logged metrics; see `deterministic` for `strict`."""
    model = model_on(found.device, shape_on(found), tokenizer())
    folder = found.folder / f"whole-{baseline}-{strict}"
    saved: dict[str, Any] = {"save_strategy": "no"} if resumed else {"save_strategy": "steps", "save_steps": 3}
    target = found.folder / f"again-{baseline}-{strict}" if resumed else folder
    with deterministic(strict) as without:
        trainer = build_trainer(baseline, model, target, found.device, **SHAPE, **saved)
        train(found, trainer, resume=folder / "checkpoint-3" if resumed else None)
    if not strict:
        found.figure(f"{baseline}: operations without a deterministic algorithm", without)
    weights = {name: p.detach().cpu() for name, p in trainer.model.state_dict().items()}
    if trainer._critic is not None:
        weights |= {f"critic.{name}": p.detach().cpu() for name, p in trainer._critic.module.state_dict().items()}
    logs = {key: logged(trainer, key) for key in ("loss", "grad_norm", "reward")}
    del trainer, model
    free()
    return weights, logs


def compare(found: Findings, name: str, baseline: str, strict: bool = False) -> None:
    """Compare a run with one that was resumed."""
    (whole, logs), (again, logs_again) = (trained(found, baseline, resumed, strict) for resumed in (False, True))
    different = [key for key in whole if not torch.equal(whole[key], again[key])]
    off = max((float((whole[key].float() - again[key].float()).abs().max()) for key in different), default=0.0)
    found.figure(f"{name}: largest difference of a weight", off)
    found.check(f"{name}: weights to the bit", not different, f"{different[:3]}: {off:.1e} off")
    found.check(f"{name}: what is logged", logs == logs_again, f"{logs} and {logs_again}")


def as_a_user_sets_it(found: Findings, name: str) -> None:
    """The same under ``torch.use_deterministic_algorithms(True)``, unless PyTorch refuses an operation."""
    try:
        compare(found, name, "basis_history", strict=True)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        found.figure(f"{name}: PyTorch refuses", str(error).split(".")[0])


def run(found: Findings) -> None:
    """Resume with a baseline that has a state, and with one that has a critic."""
    for baseline in ("basis_history", "ppo"):
        found.attempt(baseline, compare, found, baseline, baseline)
    found.attempt("strictly", as_a_user_sets_it, found, "strictly")
