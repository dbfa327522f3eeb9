"""Shared by the studies that train: a small model made once for each seed, and its accuracy during the training."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback

from basis_rl import BasisTrainer
from benchmarks.trainers import quiet
from examples.quickstart.warm_start import save
from studies.runs import kept
from studies.small_policy import warm_policy

RECIPE = str(Path(__file__).parents[1] / "examples" / "quickstart" / "basis.yaml")
LAST = 4  # measurements that a level is the mean of


@dataclass(frozen=True)
class Point:
    """One measurement during training.

    Attributes:
        step: optimizer steps so far.
        rollouts: rollouts for training so far.
        cpu: processor seconds of this process so far, of all its threads, without the measurements.
        wall: wall-clock seconds so far, without the measurements.
        scores: the measured score of each set, in [0, 1].
    """

    step: int
    rollouts: int
    cpu: float
    wall: float
    scores: dict[str, float]


class Measured(TrainerCallback):
    """Calls `score` before training and after every `every` optimizer steps; its time is not counted."""

    def __init__(self, trainer: BasisTrainer, score: Callable[[Any], dict[str, float]], every: int) -> None:
        self.trainer, self.score, self.every = trainer, score, every
        self.points: list[Point] = []
        self._began = self._now()

    def _now(self) -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def _measure(self, step: int) -> None:
        cpu, wall = self._now()
        spent = cpu - self._began[0], wall - self._began[1]
        model = self.trainer.model
        scores = self.score(model)
        model.train()
        self.points.append(Point(step, self.trainer.spending.drawn[0], *spent, scores))
        cpu, wall = self._now()
        self._began = cpu - spent[0], wall - spent[1]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = self._now()
        self._measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0:
            self._measure(state.global_step)


def measured_training(trainer: BasisTrainer, measured: Measured) -> list[Point]:
    """Train to the end; returns the points of `measured`."""
    quiet(trainer).add_callback(measured)
    trainer.train()
    trainer.end()
    return measured.points


def levels(accuracy: Sequence[float], last: int = LAST) -> list[float]:
    """The mean of each measurement and up to ``last - 1`` before it, so that one high measurement makes no level."""
    return [float(np.mean(accuracy[max(0, i + 1 - last) : i + 1])) for i in range(len(accuracy))]


def crossing(places: Sequence[float], accuracy: Sequence[float], level: float) -> float | None:
    """Where the line between two measurements first gets to `level`; None if it does not."""
    for (before, low), (after, high) in pairwise(zip(places, accuracy, strict=True)):
        if low < level <= high:
            return float(before + (after - before) * (level - low) / (high - low))
    return None


def started(
    folder: Path,
    dataset: Dataset,
    settings: dict[str, Any],
    make: Callable[[], tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]],
) -> None:
    """Ensure that `folder` has the warm-started model; `make` makes it if it is missing.

    ``warm_start.json`` records the problems and settings that it was made with.

    Raises:
        SystemExit: the folder has a model of other problems or settings, or one without ``warm_start.json``.
    """
    mark = folder / "warm_start.json"
    problems = hashlib.sha256("".join(dataset["prompt_id"]).encode()).hexdigest()[:16]

    def write() -> dict[str, Any]:
        if (folder / "config.json").is_file():
            raise SystemExit(f"{folder} has a model, but no {mark.name}. Give another --output, or remove the folder.")
        save(*make(), folder)
        return {}

    kept(mark, {"problems": problems, **settings}, write)


def quickstart_model(dataset: Dataset, seed: int, folder: Path, *, until: float, max_steps: int) -> None:
    """Ensure that `folder` has the quickstart's model, warm-started on `dataset` (`started`)."""
    settings: dict[str, Any] = {"seed": seed, "until": until, "max_steps": max_steps}
    started(folder, dataset, {"policy": "quickstart", **settings}, partial(warm_policy, dataset, **settings))
