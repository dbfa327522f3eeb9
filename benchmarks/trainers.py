"""Shared by the benchmarks of whole steps: small random models, trainers of both sides, a clock, a free reward."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from basis_rl import BasisConfig, BasisTrainer
from examples.quickstart.warm_start import build_tokenizer

TRL = "TRL"  # the side that is TRL's own trainer; the others are baselines of ours


class StepClock(TrainerCallback):
    """Records the time when each optimizer step begins.

    The time from one to the next is a whole step: generation, updates, the optimizer, and everything that trainer and
    callbacks do around them, a part of which TRL's own ``step_time`` does not include.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.began = now, list[float]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began.append(self.now())


def quiet(trainer: BasisTrainer) -> BasisTrainer:
    """Remove progress bar and printed logs from a trainer, and return it."""
    for bar in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(bar)
    return trainer


def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that costs nothing: 1 if the sum of a rollout's token ids is odd, else 0."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def tokenizer() -> Any:
    """A tokenizer with about 300 tokens."""
    return build_tokenizer(["1 + 2 ="] * 10, vocab_size=300)


def qwen3_config(
    vocabulary: int, hidden: int, layers: int, heads: int, *, inner: int = 3, tokenizer: Any = None, **settings: Any
) -> Qwen3Config:
    """A Qwen3 with an untied head, half as many heads for keys as for queries, and an MLP `inner` times as wide."""
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id} if tokenizer else {}
    shape: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner * hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2),
        "head_dim": hidden // heads, "tie_word_embeddings": False,
    }  # fmt: skip
    return Qwen3Config(**{**shape, **ends, **settings})


def random_model(*shape: int, **settings: Any) -> Qwen3ForCausalLM:
    """A model of `qwen3_config` with random weights, always the same."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(qwen3_config(*shape, **settings))


def trainer_of(side: str, model: Any, tokenizer: Any, folder: str, **settings: Any) -> GRPOTrainer:
    """The trainer of a side with groups of eight, which prints nothing and saves nothing."""
    make = GRPOTrainer if side == TRL else partial(BasisTrainer, baseline=side)
    args = (GRPOConfig if side == TRL else BasisConfig)(
        output_dir=folder, num_generations=8, logging_steps=1, save_strategy="no", report_to="none",
        gradient_checkpointing=False, disable_tqdm=True, **settings,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [f"{i} + 1 =" for i in range(256)]})
    return quiet(make(model=model, reward_funcs=parity, args=args, train_dataset=prompts, processing_class=tokenizer))
