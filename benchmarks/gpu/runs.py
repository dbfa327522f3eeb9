"""Shared by the stages: models built from configurations, short runs of a trainer, deterministic algorithms."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from basis_rl import BasisConfig, BasisTrainer
from basis_rl.baselines import Baseline, Ppo
from benchmarks.advantage_cost import baselines
from benchmarks.gpu.stage import Findings
from benchmarks.trainers import TRL, parity, quiet, qwen3_config, tokenizer

# Vocabulary, hidden size, layers, heads. The first two have 0.2 and 0.66 billion parameters, with an untied head.
SMALL, LARGE, TINY = (151_936, 512, 12, 8), (151_936, 1024, 28, 16), (320, 32, 1, 2)
PROMPTS = 64


def shape_on(found: Findings, shape: Sequence[int] = SMALL) -> Sequence[int]:
    """`shape` on a GPU, a tiny shape on a CPU."""
    return shape if found.cuda else TINY


def model_on(device: str, shape: Sequence[int], reads: Any, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """A model with random weights, always the same ones on a device."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(qwen3_config(*shape, tokenizer=reads))
    return model.to(dtype)


def save_model(folder: Path, device: str, shape: Sequence[int]) -> Path:
    """Save model and tokenizer into `folder` in the form that `from_pretrained` reads, and return the folder."""
    reads = tokenizer()
    model_on(device, shape, reads).save_pretrained(folder)
    reads.save_pretrained(folder)
    return folder


def prompts() -> Dataset:
    """Sums with the prompt ids that the tables of `benchmarks.advantage_cost.baselines` have."""
    rows = range(PROMPTS)
    return Dataset.from_dict({"prompt": [f"{i} + 1 =" for i in rows], "prompt_id": [str(i) for i in rows]})


def named_baseline(name: str) -> Baseline:
    """A registered baseline with the table or clusters that it needs for `prompts`."""
    return Ppo() if name == "ppo" else baselines(PROMPTS)[name]


class Given:
    """Rollouts of the maximum length that are given, not sampled: the same for any number of ranks, and without delay.

    The rows of a batch are numbered over all ranks. `asked` counts the batches.
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


class GivenBasis(Given, BasisTrainer):
    """Our trainer with given rollouts."""


class GivenTrl(Given, GRPOTrainer):
    """TRL's trainer with given rollouts."""


def build_trainer(
    side: str, model: Any, folder: Path | str, device: str, *, given: bool = False, cls: Any = None, **settings: Any
) -> Any:
    """A quiet trainer of a side, in bfloat16 by autocast, by default with 16 rollouts of 8 tokens per batch.

    Args:
        side: ``TRL`` or the name of a baseline.
        model: a model, or its folder.
        folder: folder for checkpoints.
        device: ``cuda`` or ``cpu``.
        given: whether rollouts are given (`Given`), not sampled.
        cls: another class of trainer.
        settings: keys of the configuration; ``peft_config``, ``prompt_sampler`` and ``baseline`` go to the trainer.
    """
    ours = side != TRL
    extra = {key: settings.pop(key) for key in ("peft_config", "prompt_sampler", "baseline") if key in settings}
    if ours:
        extra.setdefault("baseline", None)
        extra["baseline"] = extra["baseline"] or named_baseline(side)
    made = cls or {(True, True): GivenBasis, (True, False): BasisTrainer, (False, True): GivenTrl}.get(
        (ours, given), GRPOTrainer
    )
    common: dict[str, Any] = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 8, "max_steps": 3, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 3,
        "gradient_checkpointing": False, "bf16": True, "use_cpu": device == "cpu",
    }  # fmt: skip
    args = (BasisConfig if ours else GRPOConfig)(output_dir=str(folder), **{**common, **settings})
    return quiet(
        made(
            model=str(model) if isinstance(model, Path) else model, reward_funcs=parity, args=args,
            train_dataset=prompts(), processing_class=tokenizer(), **extra,
        )
    )  # fmt: skip


def logged(trainer: Any, key: str) -> list[float]:
    """The logged values of a metric, step by step."""
    return [float(row[key]) for row in trainer.state.log_history if key in row]


def train(found: Findings, trainer: Any, resume: Path | None = None) -> float:
    """Train; returns the seconds until the device has finished all work."""
    began = now(found)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return now(found) - began


def now(found: Findings) -> float:
    """The time in seconds after the device has finished all work."""
    if found.cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def free() -> None:
    """Free the device's memory that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def flat(tensors: Any) -> Tensor:
    """The numbers of all tensors in one float32 tensor."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def relative(a: Tensor, b: Tensor) -> float:
    """``|a - b| / |b|`` with Euclidean norms."""
    return float((a - b).norm() / b.norm())


@contextmanager
def deterministic(strict: bool = False) -> Iterator[list[str]]:
    """Use deterministic algorithms; yields a list of the operations for which PyTorch has none, and which it used.

    Args:
        strict: what a user would set: such an operation is an error, and attention is what PyTorch chooses. Otherwise
            it is a warning. PyTorch then keeps the faster backward passes of attention, which are not deterministic;
            so attention is computed by matrix products and a softmax.
    """
    without: list[str] = []
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        with warnings.catch_warnings(record=True) as caught, nullcontext() if strict else sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("always")
            yield without
        told = {str(warning.message).split(".")[0] for warning in caught if "deterministic" in str(warning.message)}
        without.extend(sorted(told))
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
