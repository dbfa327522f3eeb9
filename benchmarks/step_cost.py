"""What does a step cost with TRL's own trainer, with ours and `grpo`, and with ours and `otb`?

    python -m benchmarks.step_cost [--quick]

A Qwen3 of several million parameters with random weights is trained with two updates per batch (so that TRL computes
the old log-probabilities anyway), transformers generation and one CPU thread. The sides alternate in one run, in a
different order in each round. A figure is the median over the steps of a round, a ratio that of two such medians of one
round.

Memory is measured in separate steps, because counting slows them down. It is the largest sum of all tensors alive at
one time, parameters and optimizer included. Without Triton, TRL's head makes about ten temporary tensors as large as
its tile of 32,768 columns, which take more than a tensor of all logits. The tile is narrowed, so that a tensor of all
logits would show.

Results: ``benchmarks/results/step_cost.json``.
"""

from __future__ import annotations

import itertools
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from trl import GRPOTrainer

from benchmarks.common import one_thread, parser_of, save
from benchmarks.trainers import TRL, StepClock, random_model, tokenizer, trainer_of

SIDES = (TRL, "grpo", "otb")
ROWS, TOKENS, TILE = 8, 64, 2_048  # shape of a forward pass in the steps whose memory is measured


@dataclass(frozen=True)
class Scale:
    """Size of the benchmark: rounds, batches per round, and the models' vocabulary, hidden size, layers and heads."""

    rounds: int = 15
    batches: int = 6
    timed: tuple[int, ...] = (16_384, 256, 4, 4)
    weighed: tuple[int, ...] = (151_936, 32, 2, 2)


QUICK = Scale(rounds=2, batches=2, timed=(512, 32, 1, 2), weighed=(4_096, 32, 1, 2))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that an operation returned or that were given to `add`, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary()

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known[storage] = True
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result


def build(side: str, folder: str, shape: Sequence[int], **settings: Any) -> GRPOTrainer:
    """The trainer of a side with two updates per batch, and random weights of this shape (`qwen3_config`)."""
    reads = tokenizer()
    common: dict[str, Any] = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "use_cpu": True}
    return trainer_of(side, random_model(*shape, tokenizer=reads), reads, folder, bf16=False, **common, **settings)


def seconds(side: str, folder: str, scale: Scale) -> list[float]:
    """Time of each batch: generation, scoring, both updates with their optimizer steps, callbacks."""
    settings = {"per_device_train_batch_size": 16, "max_completion_length": 32, "max_steps": 2 * scale.batches + 1}
    trainer, clock = build(side, folder, scale.timed, **settings), StepClock()
    trainer.add_callback(clock)
    trainer.train()
    batches = clock.began[2::2]  # the first is a warm-up
    return [end - began for began, end in itertools.pairwise(batches)]


def peak_bytes(side: str, folder: str, scale: Scale) -> int:
    """Peak memory over two batches with two updates each, from generation to optimizer."""
    settings = {"per_device_train_batch_size": ROWS, "max_completion_length": TOKENS, "max_steps": 4}
    trainer = build(side, folder, scale.weighed, **settings)
    with patch("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", TILE), LiveBytes() as counted:
        for parameter in trainer.model.parameters():
            counted.add(parameter)
        trainer.train()
    return counted.peak


def memory(folder: str, scale: Scale) -> dict[str, int]:
    """Print and return the peak of each side, and the size of a ``(B, T, V)`` float32 tensor."""
    peaks = {side: peak_bytes(side, folder, scale) for side in SIDES}
    vocabulary = scale.weighed[0]
    logits = 4 * ROWS * TOKENS * vocabulary
    print(f"peak memory: {', '.join(f'{name} {peak / 1e6:.1f} MB' for name, peak in peaks.items())}", end="; ")
    print(f"({ROWS}, {TOKENS}, {vocabulary:,}) in float32: {logits / 1e6:.1f} MB")
    return {**peaks, "logits": logits}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    quick = parser_of(__doc__).parse_args(argv).quick
    scale = QUICK if quick else Scale()
    one_thread()
    rounds: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(scale.rounds):
            first = round_ % len(rounds)
            for side in [*rounds, *rounds][first : first + len(rounds)]:
                rounds[side].append(seconds(side, folder, scale))
        peaks = memory(folder, scale)
    for side, kept in rounds.items():
        print(f"{side}: {median(t for times in kept for t in times):.3f} s for a batch of 32 x 32 tokens, two updates")
    ratios = {}
    for lower, upper in itertools.pairwise(SIDES):
        found = sorted(median(u) / median(v) for u, v in zip(rounds[upper], rounds[lower], strict=True))
        ratios[f"{upper} / {lower}"] = found
        low, _, high = quantiles(found, n=4)
        spread = f"quartiles {low:.3f} and {high:.3f}, from {found[0]:.3f} to {found[-1]:.3f} over {len(found)} rounds"
        print(f"{upper} / {lower}: {median(found):.3f}, {spread}")
    results = {"seconds": rounds, "ratios": ratios, "peak_bytes": peaks}
    if not quick:
        save("step_cost", results)
    return results


if __name__ == "__main__":
    main()
