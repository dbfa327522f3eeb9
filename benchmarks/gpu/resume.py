"""A resumed run is bit-identical to the uninterrupted one under deterministic algorithms."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.runs import build_trainer, deterministic, free, logged, model_on, shape_on, train
from benchmarks.gpu.stage import Findings
from benchmarks.trainers import tokenizer

# Each batch is used in two steps, so the checkpoint of step 3 is in the middle of a batch.
SHAPE: dict[str, Any] = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 4}


def trained(found: Findings, baseline: str, resumed: bool) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The weights, including the critic's, and the logged metrics."""
    model = model_on(found.device, shape_on(found), tokenizer())
    folder = found.folder / f"whole-{baseline}"
    saved: dict[str, Any] = {"save_strategy": "no"} if resumed else {"save_strategy": "steps", "save_steps": 3}
    target = found.folder / f"again-{baseline}" if resumed else folder
    with deterministic() as without:
        trainer = build_trainer(baseline, model, target, found.device, **SHAPE, **saved)
        train(found, trainer, resume=folder / "checkpoint-3" if resumed else None)
    found.figure(f"{baseline}: operations without a deterministic algorithm", without)
    weights = {name: p.detach().cpu() for name, p in trainer.model.state_dict().items()}
    if trainer._critic is not None:
        weights |= {f"critic.{name}": p.detach().cpu() for name, p in trainer._critic.module.state_dict().items()}
    logs = {key: logged(trainer, key) for key in ("loss", "grad_norm", "reward")}
    del trainer, model
    free()
    return weights, logs


def run(found: Findings) -> None:
    """Resume with a baseline that has a state, and with one that has a critic."""
    for baseline in ("basis_history", "ppo"):
        with found.part(baseline):
            (whole, logs), (again, logs_again) = (trained(found, baseline, resumed) for resumed in (False, True))
            different = [name for name in whole if not torch.equal(whole[name], again[name])]
            off = max((float((whole[name] - again[name]).abs().max()) for name in different), default=0.0)
            found.figure(f"{baseline}: largest difference of a weight", off)
            found.check(f"{baseline}: weights to the bit", not different, f"{different[:3]}: {off:.1e} off")
            found.check(f"{baseline}: what is logged", logs == logs_again, f"{logs} and {logs_again}")
