"""``run.json``: what a run's folder says of the run beside its recipe and its metrics."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from basis_rl.values import ValueTable

if TYPE_CHECKING:
    from basis_rl.trainer.trainer import BasisTrainer

FILE_NAME = "run.json"
_PACKAGES = ("basis-rl", "torch", "trl", "transformers", "accelerate", "datasets", "math-verify")


def begin_run_file(folder: str | Path, trainer: BasisTrainer, baseline: str) -> None:
    """Write `describe_run` as the record of a run that is not finished."""
    _write(Path(folder), {**describe_run(trainer, baseline), "finished": False})


def finish_run_file(folder: str | Path) -> None:
    """Mark the run as finished: its model is saved."""
    path = Path(folder)
    _write(path, {**json.loads((path / FILE_NAME).read_text()), "finished": True})


def describe_run(trainer: BasisTrainer, baseline: str) -> dict[str, Any]:
    """Settings that count whether given or by default, versions, machine, and the value table with its price.

    ``value_table.responses`` is the number of reference rollouts that the table was built from: what it cost once.
    """
    args, ranks = trainer.args, trainer.accelerator.num_processes
    device = trainer.accelerator.device
    packages = (*_PACKAGES, *(("vllm",) if trainer.use_vllm else ()))
    record: dict[str, Any] = {
        "settings": {
            "baseline": baseline,
            "objective": trainer._objective,
            "num_generations": args.num_generations,
            "responses_per_batch": args.generation_batch_size,
            "responses_per_update": args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks,
            "learning_rate": args.learning_rate,
            "seed": args.seed,
        },
        "versions": {name: found for name in packages if (found := _version(name))},
        "machine": {
            "processes": ranks,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
    }
    table = getattr(trainer.baseline, "values", None)
    if isinstance(table, ValueTable):
        record["value_table"] = {
            "source": table.source,
            "id": table.digest,
            "prompts": len(table),
            "responses": table.provenance.get("rollouts", table.num_rollouts),
        }
    return record


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _write(folder: Path, record: dict[str, Any]) -> None:
    part = folder / f".{FILE_NAME}.part"
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(folder / FILE_NAME)
