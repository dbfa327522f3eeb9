"""What a checkpoint holds beside transformers' files: the baseline's state, and on each rank that of the parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset

from basis_rl.baselines import Baseline
from basis_rl.trainer.gather import row_prompt_id
from basis_rl.trainer.ports import BufferedRun, Stateful
from basis_rl.types import RolloutBatch

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


def prompt_ids_of(dataset: Any) -> list[str] | None:
    """The ids of the training prompts in their order; None for a stream, which is not read twice."""
    if not isinstance(dataset, Dataset):
        return None
    if "prompt_id" in dataset.column_names:
        ids = list(dataset["prompt_id"])
        if None not in ids:
            return [str(name) for name in ids]
    return [row_prompt_id(row) for row in dataset]


def dataset_identity(prompt_ids: Sequence[str] | None) -> str | None:
    """A hash over the ids of the training prompts in their order; None where they are not known."""
    if prompt_ids is None:
        return None
    digest = hashlib.sha256()
    for name in prompt_ids:
        digest.update(f"{name}\n".encode())
    return digest.hexdigest()[:16]


class Unlearnt:
    """Generation batches that the baseline has not learnt from: the policy is still being updated on them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, RolloutBatch]] = []

    def add(self, batch: RolloutBatch, used_up: int) -> None:
        """Keep a batch until micro-batch `used_up` of the run, the last one that trains on it."""
        self._waiting.append((used_up, batch))

    def due(self, step: int) -> Iterator[RolloutBatch]:
        """The batches that are used up after `step` micro-batches, oldest first; they are kept no longer."""
        while self._waiting and self._waiting[0][0] <= step:
            yield self._waiting.pop(0)[1]

    def forget(self, index: int) -> None:
        """Drop the generation batches from number `index` on."""
        self._waiting = [(used_up, batch) for used_up, batch in self._waiting if batch.step < index]

    @property
    def newest(self) -> RolloutBatch:
        return self._waiting[-1][1]

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": [(used_up, vars(batch)) for used_up, batch in self._waiting]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = [(used_up, RolloutBatch(**fields)) for used_up, fields in state["waiting"]]


class Place:
    """Where a rank is in its run: TRL's count of micro-batches, the rollouts in use, the metrics since the last log.

    A generation batch may serve several optimizer steps. Its rollouts cannot be drawn again, because the policy that
    drew them is gone, so between two generations they are part of the state.
    """

    def __init__(self, trainer: BufferedRun) -> None:
        self.trainer = trainer

    def _shape(self) -> dict[str, int]:
        every = self.trainer.args.steps_per_generation * self.trainer.num_iterations
        return {"ranks": self.trainer.accelerator.num_processes, "generate_every": every}

    def state_dict(self) -> dict[str, Any]:
        trainer, shape = self.trainer, self._shape()
        between = trainer._step % shape["generate_every"] != 0
        return {
            "step": trainer._step,
            **shape,
            "rollouts": trainer._buffered_inputs if between else None,
            "metrics": {mode: dict(values) for mode, values in trainer._metrics.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result.

        Raises:
            ValueError: it was saved between two generations, by another number of processes or with batches of another
                shape.
        """
        trainer, now = self.trainer, self._shape()
        other = {key: state[key] for key in now if state[key] != now[key]}
        if state["rollouts"] is not None and other:
            raise ValueError(
                f"The checkpoint was saved in the middle of a generation batch, with {other}; this run has {now}, and "
                "its rollouts do not fit. Resume with the same number of processes, steps_per_generation and "
                "num_iterations, or from a checkpoint at the end of a generation batch."
            )
        batches = int(state["step"]) // state["generate_every"]
        trainer._step = batches * now["generate_every"] if other else int(state["step"])
        trainer._buffered_inputs = send_to_device(state["rollouts"], trainer.accelerator.device)
        for mode, values in state["metrics"].items():
            trainer._metrics[mode].update(values)


def save_parts(folder: str | Path, rank: int, parts: Mapping[str, Stateful]) -> None:
    """Write the state of this rank's parts into a checkpoint folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save({name: part.state_dict() for name, part in parts.items()}, _parts_file(folder, rank))


def load_parts(folder: str | Path, rank: int, parts: Mapping[str, Stateful]) -> None:
    """Restore `save_parts`'s result; a rank that the saving run did not have takes the first one's.

    A checkpoint of TRL's own trainer has none: the run then starts with a generation batch. A part that the saving run
    did not have stays as it was built.
    """
    path = _parts_file(folder, rank)
    path = path if path.is_file() else _parts_file(folder, 0)
    if not path.is_file():
        return
    content = torch.load(path, weights_only=True, map_location="cpu")  # "cpu:0", a rank's device, it does not know
    for name, part in parts.items():
        if name in content:
            part.load_state_dict(content[name])


def _parts_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"phase_{rank}.pt"
