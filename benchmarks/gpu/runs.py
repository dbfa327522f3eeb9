"""Shared by the measurements and by `tests/device`: models with random weights, and short runs of either trainer."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from basis_rl import BasisConfig, BasisTrainer
from basis_rl.baselines import Baseline, Ppo, Sao
from benchmarks.advantage_cost import baselines
from benchmarks.trainers import TRL, parity, quiet, qwen3_config, tokenizer

# Vocabulary, hidden size, layers, heads. SMALL has 0.2 and LARGE 0.66 billion parameters, with an untied head.
SMALL, LARGE, TINY = (151_936, 512, 12, 8), (151_936, 1024, 28, 16), (320, 32, 1, 2)
PROMPTS = 64


def model_on(device: str, shape: Sequence[int] = SMALL, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, the same ones at each call; on a CPU it is `TINY` whatever the shape."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(qwen3_config(*(TINY if device == "cpu" else shape), tokenizer=tokenizer()))
    return model.to(dtype)


def named_baseline(name: str) -> Baseline:
    """A registered baseline with the value table or the clusters that it needs for the prompts of `build_trainer`."""
    learned: dict[str, Baseline] = {"ppo": Ppo(), "sao": Sao(critic_model=None, critic_freeze_attention=False)}
    return learned[name] if name in learned else baselines(PROMPTS)[name]


class Given:
    """A trainer whose rollouts are random tokens of the maximum length, so that generation takes no time.

    The rows of a batch are numbered over all ranks, so that any number of ranks trains on the same rollouts.
    """

    asked = 0

    def _generate_single_turn(self: Any, prompt_ids: list[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        first = (self.asked * self.accelerator.num_processes + self.accelerator.process_index) * len(prompt_ids)
        self.asked += 1
        tokens, vocabulary = self.args.max_completion_length, self.model.config.vocab_size
        rows = []
        for row in range(first, first + len(prompt_ids)):
            drawn = torch.randint(3, vocabulary, (tokens,), generator=torch.Generator().manual_seed(row))
            rows.append(drawn.tolist())
        return rows, None


def build_trainer(
    side: str, model: Any, folder: Path | str, device: str, *, given: bool = False, cls: Any = None, **settings: Any
) -> Any:
    """A trainer in bfloat16 by autocast, by default with 16 rollouts of 8 tokens per batch; it prints nothing.

    Args:
        side: ``TRL`` or the name of a baseline.
        model: a model, or its folder.
        folder: folder for checkpoints.
        device: ``cuda`` or ``cpu``.
        given: whether the rollouts are `Given`; otherwise they are sampled.
        cls: another class of trainer.
        settings: keys of the configuration; ``peft_config`` and ``prompt_sampler`` go to the trainer.
    """
    extra: dict[str, Any] = {key: settings.pop(key) for key in ("peft_config", "prompt_sampler") if key in settings}
    if side != TRL:
        extra["baseline"] = named_baseline(side)
    cls = cls or (GRPOTrainer if side == TRL else BasisTrainer)
    if given:
        cls = type(f"Given{cls.__name__}", (Given, cls), {})
    common: dict[str, Any] = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 8, "max_steps": 3, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 3,
        "gradient_checkpointing": False, "bf16": True, "use_cpu": device == "cpu",
    }  # fmt: skip
    args = (GRPOConfig if side == TRL else BasisConfig)(output_dir=str(folder), **{**common, **settings})
    rows = range(PROMPTS)
    prompts = Dataset.from_dict({"prompt": [f"{i} + 1 =" for i in rows], "prompt_id": [str(i) for i in rows]})
    model = str(model) if isinstance(model, Path) else model
    return quiet(
        cls(model=model, reward_funcs=parity, args=args, train_dataset=prompts, processing_class=tokenizer(), **extra)
    )


def now(device: str) -> float:
    """The time in seconds after the device has finished all work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def free() -> None:
    """Free the device's memory that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
