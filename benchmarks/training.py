"""What the studies that train share: a small model made once for each seed, and accuracy while it is trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from basis_rl import BasisTrainer
from basis_rl.data import DataArguments, load_prompts
from basis_rl.evaluation import accuracy
from examples.quickstart.warm_start import build_model, build_tokenizer, save, warm_start


@dataclass(frozen=True)
class Point:
    """One measurement during training.

    Attributes:
        step: optimizer steps so far.
        responses: sampled for training so far.
        cpu: processor seconds of this process so far, all its threads, measurements left out.
        wall: seconds by the clock so far, measurements left out.
        scores: what was measured, by set, in [0, 1].
    """

    step: int
    responses: int
    cpu: float
    wall: float
    scores: dict[str, float]


class Measured(TrainerCallback):
    """Calls `score` before training and after every `every` optimizer steps; what that costs is not counted."""

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


class StepClock(TrainerCallback):
    """What the clock says when each optimizer step begins. From one to the next is a whole step: generation, updates,
    the optimizer, and all that trainer and callbacks do around them, which TRL's own ``step_time`` leaves out in part.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.began = now, list[float]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began.append(self.now())


def quiet(trainer: BasisTrainer) -> BasisTrainer:
    """Without progress bar and printed logs."""
    for bar in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(bar)
    return trainer


def measured_training(
    trainer: BasisTrainer, score: Callable[[Any], dict[str, float]], every: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train to the end: the points of `Measured`, and the trainer's log, as JSON can hold them.

    Raises:
        SystemExit: a signal stopped the training, which must not count as a run.
    """
    measured = Measured(trainer, score, every)
    quiet(trainer).add_callback(measured)
    trainer.train()
    if trainer.stop_on_signal.stopped:
        raise SystemExit("Stopped by a signal; this run is made again by the next call.")
    trainer.end()
    return [asdict(point) for point in measured.points], trainer.state.log_history


def greedy(
    trainer: BasisTrainer, sets: dict[str, Dataset], reward: Any, length: int
) -> Callable[[Any], dict[str, float]]:
    """Accuracy of one greedy answer to each problem of each of `sets`."""
    tokenizer = trainer.processing_class

    def score(model: Any) -> dict[str, float]:
        return {
            name: accuracy(model, tokenizer, problems, reward, max_completion_length=length)
            for name, problems in sets.items()
        }

    return score


def quickstart_model(
    data: DataArguments, seed: int, folder: Path, *, until: float = 0.45, max_steps: int = 3000
) -> None:
    """The quickstart's model, warm-started on these problems to the share `until`; nothing if it is there."""
    if (folder / "config.json").is_file():
        return
    set_seed(seed)
    train = load_prompts(data, conversational=True)
    texts = [row[0]["content"] for row in train["prompt"][:2000]]
    tokenizer = build_tokenizer([*texts, *["\\boxed{7}", "assistant\n", "user\n"] * len(texts)])
    model = build_model(tokenizer)
    warm_start(model, tokenizer, train, until=until, max_steps=max_steps)
    save(model, tokenizer, folder)
