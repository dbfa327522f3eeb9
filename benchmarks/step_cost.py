"""What does a step cost: TRL's own trainer, ours with `grpo`, ours with `otb`?   python -m benchmarks.step_cost

A Qwen3 of some millions of parameters with random weights, two updates a batch (so that TRL computes the old
log-probabilities anyway), transformers generation, one CPU thread. All sides in one run, alternating, each round in
another order; a figure is the median over the steps of a round, a ratio that of two such medians of one round.

Memory is measured in steps of their own, since counting slows them: the largest sum of the tensors that are alive at
one time, parameters and optimizer included. Without Triton TRL's head makes about ten temporaries as large as its tile
of 32,768 columns, more than a tensor of all logits takes; the tile is narrowed so that one could not hide.
"""

from __future__ import annotations

import itertools
import tempfile
import weakref
from functools import partial
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from basis_rl import BasisConfig, BasisTrainer
from benchmarks.common import one_thread, save
from benchmarks.trainers import StepClock, parity, quiet
from examples.quickstart.warm_start import build_tokenizer

ROUNDS, STEPS = 15, 6
TRL = "TRL"
ROWS, TOKENS, VOCABULARY, TILE = 8, 64, 151_936, 2_048  # of a forward pass in the steps whose memory is counted


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages alive that an op within it returned, or that were given to `add`; and their peak."""

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


def build(side: str, folder: str, model: dict[str, Any], **settings: Any) -> GRPOTrainer:
    """The trainer of a side, with random weights of this shape."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(["1 + 2 ="] * 10, vocab_size=300)
    config = Qwen3Config(
        **model,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    make = GRPOTrainer if side == TRL else partial(BasisTrainer, baseline=side)
    trainer = make(
        model=Qwen3ForCausalLM(config),
        reward_funcs=parity,
        args=(GRPOConfig if side == TRL else BasisConfig)(
            output_dir=folder,
            gradient_accumulation_steps=1,
            steps_per_generation=2,
            num_generations=8,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{i} + 1 =" for i in range(256)]}),
        processing_class=tokenizer,
    )
    return quiet(trainer)


def seconds(side: str, folder: str) -> list[float]:
    """Time of each batch: generation, scoring, both updates with their optimizer steps, callbacks."""
    model: dict[str, Any] = {
        "vocab_size": 16_384,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    settings = {"per_device_train_batch_size": 16, "max_completion_length": 32, "max_steps": 2 * STEPS + 1}
    trainer, clock = build(side, folder, model, **settings), StepClock()
    trainer.add_callback(clock)
    trainer.train()
    batches = clock.began[2::2]  # the first is a warm-up
    return [end - began for began, end in itertools.pairwise(batches)]


def peak_bytes(side: str, folder: str) -> int:
    """Over two batches, two updates each, from generation to optimizer."""
    model: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    settings = {"per_device_train_batch_size": ROWS, "max_completion_length": TOKENS, "max_steps": 4}
    trainer = build(side, folder, model, **settings)
    with patch("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", TILE), LiveBytes() as counted:
        for parameter in trainer.model.parameters():
            counted.add(parameter)
        trainer.train()
    return counted.peak


def memory(folder: str) -> dict[str, int]:
    """Peaks of both sides, and the size of a ``(B, T, V)`` float32 tensor; printed too."""
    peaks = {side: peak_bytes(side, folder) for side in (TRL, "grpo", "otb")}
    logits = 4 * ROWS * TOKENS * VOCABULARY
    print(f"peak memory: {', '.join(f'{name} {peak / 1e6:.1f} MB' for name, peak in peaks.items())}", end="; ")
    print(f"({ROWS}, {TOKENS}, {VOCABULARY:,}) in float32: {logits / 1e6:.1f} MB")
    return {**peaks, "logits": logits}


def main() -> None:
    """The benchmark."""
    one_thread()
    rounds: dict[str, list[list[float]]] = {TRL: [], "grpo": [], "otb": []}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(ROUNDS):
            first = round_ % len(rounds)
            for side in [*rounds, *rounds][first : first + len(rounds)]:
                rounds[side].append(seconds(side, folder))
        peaks = memory(folder)
    for side, kept in rounds.items():
        print(f"{side}: {median(t for times in kept for t in times):.3f} s for a batch of 32 x 32 tokens, two updates")
    ratios = {}
    for upper, lower in (("grpo", TRL), ("otb", "grpo")):
        found = sorted(median(u) / median(v) for u, v in zip(rounds[upper], rounds[lower], strict=True))
        ratios[f"{upper} / {lower}"] = found
        low, _, high = quantiles(found, n=4)
        spread = f"quartiles {low:.3f} and {high:.3f}, from {found[0]:.3f} to {found[-1]:.3f} over {ROUNDS} rounds"
        print(f"{upper} / {lower}: {median(found):.3f}, {spread}")
    save("step_cost", {"seconds": rounds, "ratios": ratios, "peak_bytes": peaks})


if __name__ == "__main__":
    main()
