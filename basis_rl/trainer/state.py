"""What a checkpoint holds beside transformers' files: the baseline's state, and where in a generation batch we are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset

from basis_rl.baselines import Baseline
from basis_rl.trainer.gather import row_prompt_id
from basis_rl.types import RolloutBatch

if TYPE_CHECKING:
    from basis_rl.trainer.trainer import BasisTrainer

FILE_NAME = "baseline_state.pt"


def save_baseline(folder: str | Path, baseline: Baseline, step: int, dataset: str | None = None) -> None:
    """Write the state, the index of the next generation batch and the dataset's identity into a checkpoint folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    content = {"baseline": type(baseline).__name__, "step": step, "state": baseline.state_dict(), "dataset": dataset}
    torch.save(content, Path(folder) / FILE_NAME)


def load_baseline(folder: str | Path, baseline: Baseline, dataset: str | None = None) -> int:
    """Restore the state from a checkpoint folder and return the index of the next generation batch.

    Raises:
        ValueError: the checkpoint has no state for a baseline that has one, or the state of another baseline, or it was
            saved with other training prompts.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        if not baseline.state_dict():
            return 0
        raise ValueError(f"'{folder}' has no {FILE_NAME}: it was not saved with this baseline. Start a new run.")
    content = torch.load(path, weights_only=True)
    if content["baseline"] != type(baseline).__name__:
        raise ValueError(
            f"'{folder}' was saved with the baseline {content['baseline']}, this run has {type(baseline).__name__}. "
            "Resume with the same baseline, or start a new run from the checkpoint's model."
        )
    there = content.get("dataset")
    if dataset is not None and there is not None and dataset != there:
        raise ValueError(
            f"'{folder}' was saved while training on other prompts (their hash is {there}, this run's is {dataset}). "
            "Resume with the same dataset, in the same order, or start a new run from the checkpoint's model."
        )
    baseline.load_state_dict(content["state"])
    return int(content["step"])


def dataset_identity(dataset: Any) -> str | None:
    """A hash over the ids of the training prompts in their order; None for a stream, which is not read twice."""
    if not isinstance(dataset, Dataset):
        return None
    digest = hashlib.sha256()
    ids = dataset["prompt_id"] if "prompt_id" in dataset.column_names else map(row_prompt_id, dataset)
    for name in ids:
        digest.update(f"{name}\n".encode())
    return digest.hexdigest()[:16]


def save_phase(folder: str | Path, trainer: BasisTrainer) -> None:
    """Write this rank's place in the run: the micro-batch counter, and between two generations the rollouts in use.

    A generation batch may serve several optimizer steps. Its rollouts cannot be drawn again, because the policy that
    drew them is gone, so they go into the checkpoint.
    """
    between = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) != 0
    content = {
        "step": trainer._step,
        "ranks": trainer.accelerator.num_processes,
        "generate_every": trainer.args.steps_per_generation * trainer.num_iterations,
        "skipped_steps": trainer._finite.skipped,
        "spending": trainer.spending.state_dict(),
        "rollouts": trainer._buffered_inputs if between else None,
        "unlearnt": [(used_up, vars(batch)) for used_up, batch in trainer._unlearnt],
        "critic": trainer._critic.state() if trainer._critic is not None else None,
        "prefetch": trainer._prefetch.state_dict() if trainer._prefetch is not None else None,
        "metrics": {mode: dict(values) for mode, values in trainer._metrics.items()},
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(content, _phase_file(folder, trainer))


def load_phase(folder: str | Path, trainer: BasisTrainer) -> None:
    """Restore `save_phase`'s result; a checkpoint of TRL's own trainer has none and starts a generation batch.

    Raises:
        ValueError: the checkpoint was saved between two generations, by another number of processes or with batches of
            another shape.
    """
    path = _phase_file(folder, trainer)
    if not path.is_file():
        path = _phase_file(folder, trainer, rank=0)
    if not path.is_file():
        return
    content = torch.load(path, weights_only=True, map_location="cpu")  # "cpu:0", a rank's device, it does not know
    now = {
        "ranks": trainer.accelerator.num_processes,
        "generate_every": trainer.args.steps_per_generation * trainer.num_iterations,
    }
    other = {key: content[key] for key in now if content[key] != now[key]}
    if content["rollouts"] is not None and other:
        raise ValueError(
            f"'{folder}' was saved in the middle of a generation batch, with {other}; this run has {now}, and "
            "its rollouts do not fit. Resume with the same number of processes, steps_per_generation and "
            "num_iterations, or from a checkpoint at the end of a generation batch."
        )
    batches = int(content["step"]) // content["generate_every"]
    trainer._step = batches * now["generate_every"] if other else int(content["step"])
    trainer._finite.skipped = int(content["skipped_steps"])
    trainer.spending.load_state_dict(content.get("spending") or trainer.spending.state_dict())
    trainer._buffered_inputs = send_to_device(content["rollouts"], trainer.accelerator.device)
    trainer._unlearnt = [(used_up, RolloutBatch(**fields)) for used_up, fields in content["unlearnt"]]
    if trainer._critic is not None:
        trainer._critic.load_state(content.get("critic") or {})
    if trainer._prefetch is not None and content.get("prefetch") and not other:
        trainer._prefetch.load_state_dict(content["prefetch"])
    for mode, values in content["metrics"].items():
        trainer._metrics[mode].update(values)


def _phase_file(folder: str | Path, trainer: BasisTrainer, rank: int | None = None) -> Path:
    return Path(folder) / f"phase_{trainer.accelerator.process_index if rank is None else rank}.pt"
