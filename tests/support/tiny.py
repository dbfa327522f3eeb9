"""A model of a few thousand parameters, a dataset of sums, and the settings that every trainer test shares."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOTrainer

from basis_rl.baselines import Baseline, build_baseline
from basis_rl.data import prompt_id
from basis_rl.trainer import BasisConfig, BasisTrainer
from basis_rl.types import Advantages
from basis_rl.values import ValueTable
from examples.quickstart.warm_start import build_model, build_tokenizer

DEVICE = os.environ.get("BASIS_TEST_DEVICE", "cpu")  # where trainers of `config` train


def tiny_tokenizer():
    return build_tokenizer(["State the sum of 1 + 2 =", "\\boxed{7}", "user\n", "assistant\n"] * 50, vocab_size=300)


def tiny_model(tokenizer=None, seed=0):
    torch.manual_seed(seed)
    return build_model(tokenizer or tiny_tokenizer(), hidden_size=16, layers=1)


def sums(n=16) -> Dataset:
    rows = []
    for i in range(n):
        question = f"{i} + {i + 1} ="
        rows.append(
            {
                "prompt": [{"role": "user", "content": question}],
                "solution": str(2 * i + 1),
                "prompt_id": prompt_id(question),
            }
        )
    return Dataset.from_list(rows)


def table_for(dataset: Dataset) -> ValueTable:
    return ValueTable.from_rewards(
        {p: [1.0] * (i % 5) + [0.0] * (4 - i % 5) for i, p in enumerate(dataset["prompt_id"])}
    )


def named_baseline(name: str, dataset: Dataset) -> Baseline:
    """A registered baseline with what it needs to know of the dataset."""
    tables = {name: {"values": table_for(dataset)} for name in ("basis", "basis_history", "a_star_po")}
    clusters = {p: i % 3 for i, p in enumerate(dataset["prompt_id"])}
    # The tiny model is built in memory, so there is no folder to load a value model from.
    head = {"critic_model": None, "critic_freeze_attention": False, "critic_warmup_steps": 0}
    needed = {**tables, "bv_blend": {"clusters": clusters}, "sao": head}
    return build_baseline(name, **needed.get(name, {}))


def config(output_dir: Path | str, **overrides: Any) -> BasisConfig:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": DEVICE == "cpu",
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    return BasisConfig(output_dir=str(output_dir), **{**settings, **overrides})


def parity_reward(completions, completion_ids, **kwargs):
    """0 or 1 by the sum of the sampled token ids: random enough that groups are mixed, and always the same."""
    return [float(sum(ids) % 2) for ids in completion_ids]


SETTINGS = {field.name for field in fields(BasisConfig)}


def tiny_trainer(folder: Path | str, baseline: Any = "rloo", cls: type = BasisTrainer, **given: Any) -> Any:
    """A trainer of the tiny model on `sums`; `given` are settings of `config` and arguments of the trainer."""
    settings = {name: value for name, value in given.items() if name in SETTINGS}
    arguments = {name: value for name, value in given.items() if name not in SETTINGS}
    tokenizer = arguments.setdefault("processing_class", tiny_tokenizer())
    model = arguments.pop("model", None)
    return cls(
        model=tiny_model(tokenizer) if model is None else str(model) if isinstance(model, Path) else model,
        args=config(folder, **settings),
        baseline=named_baseline(baseline, sums()) if isinstance(baseline, str) else baseline,
        **{"reward_funcs": parity_reward, "train_dataset": sums(), **arguments},
    )


class Tokenwise(Baseline):
    """REINFORCE spelled per token: the same gradient as `none`, through the ``(N, T)`` path."""

    token_level = "always"

    def advantages(self, batch):
        values = torch.nan_to_num(batch.rewards)[:, None] * batch.action_mask
        return Advantages(values=values, baseline=torch.zeros_like(values))


class Keeps(BasisTrainer):
    """Keeps of each generation batch what `noted` says: the global batch and this rank's advantages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kept: list[Any] = []
        super().__init__(*args, **kwargs)

    def _advantages(self, inputs, output):
        local = super()._advantages(inputs, output)
        self.kept.append(self.noted(inputs, output, local))
        return local

    def noted(self, inputs, output, local) -> Any:
        return self._pending.newest, local.double().cpu()


def flat(tensors) -> torch.Tensor:
    """The numbers of all tensors in one float32 tensor."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


class Traced:
    """Keeps loss and gradient of each optimizer step, of a trainer of ours or TRL's that it stands before.

    Ours may move rows among the micro-batches of a step, so their sums are what must be equal.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.trace: list[Any] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model, *args, **kwargs):
        first = self._step % self.args.gradient_accumulation_steps == 0
        before = 0.0 if first else self.trace.pop()[0]
        loss = super().training_step(model, *args, **kwargs)
        gradient = flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
        self.trace.append((before + float(loss), gradient))
        return loss


class TracedTrl(Traced, GRPOTrainer):
    pass


class TracedBasis(Traced, BasisTrainer):
    pass
