"""What does an optimizer step cost on ragged rollouts: TRL's trainer, ours with padding, and ours without?

    python -m benchmarks.step_cost [--quick] [--only CASE ...]

A Qwen3 of 6 layers with random weights is trained on canned rollouts, so that a step is scoring, loss, backward and
optimizer: 64 or 32 rollouts in micro-batches of 8, one update per generation batch. Lengths of prompts and rollouts are
log-normal (prompts: mean 56, sd/mean 0.4; rollouts: mean 80, cap 200). One thread. The sides alternate in one run, in
a different order in each round; a figure is the processor time of a round's second step, and a ratio is one of two such
times of one round. Other cases have a mixture of eight experts with its auxiliary loss (Qwen3-MoE), a hybrid with three
layers of linear attention in four (Qwen3.5), or rollouts of several turns of which those of a prompt share the first.

- ``TRL``: `GRPOTrainer` as it is.
- ``TRL, head fixed``: the same, with `basis_rl.trainer.head` on a CPU in place of its head. A GPU has such a head.
- ``padded``: ours with ``packing: none``.
- ``packed``: ours as it is: no padding, and what rollouts begin with in common once.
- ``budget``: the same with a budget of 2,048 tokens for a micro-batch instead of 8 rollouts.

Memory is measured in separate steps, because counting slows them down: the largest sum of all tensors alive at one
time, less parameters, gradients and optimizer.

Results: ``benchmarks/results/step_cost.json``.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import json
import math
import tempfile
import time
import weakref
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from basis_rl import BasisConfig, BasisTrainer
from basis_rl.trainer.head import compact_head
from benchmarks.common import RESULTS, one_thread, parser_of, save
from benchmarks.trainers import StepClock, parity, quiet, qwen3_config, tokenizer

MEAN, CAP, PROMPT_MEAN, PROMPT_SPREAD = 80, 200, 56, 0.4
MICRO_BATCH = 8
TRL, FIXED, PADDED, PACKED, BUDGET = "TRL", "TRL, head fixed", "padded", "packed", "budget"
TOKENS = 2_048


@dataclass(frozen=True)
class Case:
    """Sides and what they share: spread (sd/mean) of lengths, rollouts per prompt, rows, settings, the kind of model;
    `turns`: tokens of a first turn, which four rollouts share; `weighed`: memory is measured, not time."""

    spread: float
    group: int = 8
    sides: tuple[str, ...] = (TRL, FIXED, PADDED, PACKED)
    baseline: str = "grpo"
    rows: int = 32
    weighed: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen3"
    turns: int = 0


OURS = (PADDED, PACKED, BUDGET)
ALONE = (PADDED, PACKED)
CASES = {
    "G = 8, spread 0.5": Case(0.5, rows=64),
    "G = 8, spread 0.8": Case(0.8, rows=64),
    "G = 1, spread 0.5": Case(0.5, group=1, sides=ALONE, baseline="none", rows=64),
    "G = 1, spread 0.8": Case(0.8, group=1, sides=ALONE, baseline="none", rows=64),
    "equal lengths, nothing shared": Case(0.0, group=1, sides=ALONE, baseline="none"),
    "otb": Case(0.8, sides=ALONE, baseline="otb"),
    "ppo": Case(0.8, sides=ALONE, baseline="ppo"),
    "KL": Case(0.8, sides=(TRL, PACKED), settings={"beta": 0.04}),
    "mixture of experts": Case(0.8, model="mixture"),
    "hybrid": Case(0.8, model="hybrid"),
    "turns": Case(0.8, turns=60),
    "token budget": Case(0.8, sides=(PACKED, BUDGET), rows=64),
    "memory": Case(0.8, weighed=True),
    "G = 8, bf16": Case(0.8, rows=64, settings={"bf16": True}),
    "G = 1, bf16": Case(0.8, group=1, sides=ALONE, baseline="none", rows=64, settings={"bf16": True}),
}


@dataclass(frozen=True)
class Scale:
    """Rounds, steps of a round beside the first, and the model's vocabulary, hidden size, layers and heads."""

    rounds: int = 3
    steps: int = 1
    shape: tuple[int, int, int, int] = (8_192, 256, 6, 8)


QUICK = Scale(rounds=1, steps=1, shape=(512, 32, 1, 2))


def lognormal(generator: torch.Generator, mean: float, spread: float, count: int) -> Tensor:
    """`count` lengths of that mean and ratio of standard deviation to mean."""
    variance = math.log(1 + spread * spread)
    return torch.exp(torch.randn(count, generator=generator) * math.sqrt(variance) + math.log(mean) - variance / 2)


class Canned:
    """Prompts and rollouts of random tokens whose lengths are drawn, the same for every side."""

    spread: float
    shared_turn: int
    group: int
    tokens: int
    last: int
    real: int
    all: int

    def _tokenize_prompts(self, prompts: list[str]) -> Any:
        found = []
        for prompt in prompts:
            generator = torch.Generator().manual_seed(int(prompt))
            spread = PROMPT_SPREAD if self.spread else 0.0
            length = int(lognormal(generator, PROMPT_MEAN, spread, 1).round().clamp(12, 400))
            found.append(torch.randint(5, self.tokens, (length,), generator=generator).tolist())
        return found, None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        number = self.__dict__.setdefault("_batches", 0)
        self._batches = number + 1
        generator = torch.Generator().manual_seed(1_000 + number)
        lengths = lognormal(generator, MEAN, self.spread, len(prompt_ids)).round().clamp(1, CAP).long().tolist()
        found = [torch.randint(5, self.tokens, (length,), generator=generator).tolist() for length in lengths]
        # Half of a prompt's rollouts begin with the same turn, as far as they go.
        for first in range(0, len(found), max(1, self.group // 2)):
            for ids in found[first : first + self.group // 2]:
                ids[: self.shared_turn] = found[first][: self.shared_turn][: len(ids)]
        for ids in found:
            if len(ids) < CAP:
                ids[-1] = self.last
        prompts = [len(ids) for ids in prompt_ids]
        self.real = self.__dict__.get("real", 0) + sum(prompts) + sum(lengths)
        self.all = self.__dict__.get("all", 0) + len(prompts) * (max(prompts) + max(lengths))
        return found, None


class CannedTrl(Canned, GRPOTrainer):
    """TRL's trainer on canned rollouts."""


class CannedFixed(CannedTrl):
    """The same with our head."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with compact_head(self.accelerator.device):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class CannedBasis(Canned, BasisTrainer):
    """Ours on canned rollouts."""


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


def model_of(kind: str, scale: Scale, reads: Any) -> Any:
    """The model of a case, with random weights."""
    config = qwen3_config(*scale.shape, tokenizer=reads, tie_word_embeddings=True)
    if kind == "qwen3":
        return Qwen3ForCausalLM(config)
    names = set(inspect.signature(Qwen3Config).parameters)
    shape: dict[str, Any] = {
        name: value for name, value in config.to_dict().items() if name in names and name != "layer_types"
    }
    if kind == "mixture":
        experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": scale.shape[1]}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    # Three layers in four have linear attention, by default.
    heads: dict[str, Any] = {
        "linear_num_value_heads": scale.shape[3],
        "linear_num_key_heads": max(1, scale.shape[3] // 2),
    }
    sizes: dict[str, Any] = {"linear_key_head_dim": config.head_dim, "linear_value_head_dim": config.head_dim}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, **heads, **sizes))


def build(side: str, case: Case, folder: str, scale: Scale, steps: int) -> Any:
    """The trainer of a side for that many optimizer steps."""
    reads = tokenizer()
    torch.manual_seed(0)
    model = model_of(case.model, scale, reads)
    model.save_pretrained(folder)  # where TRL loads the reference from
    ours = side in OURS
    parts = case.rows // MICRO_BATCH
    settings: dict[str, Any] = {
        "num_generations": case.group, "per_device_train_batch_size": MICRO_BATCH, "seed": 3,
        "gradient_accumulation_steps": parts, "steps_per_generation": parts, "max_completion_length": CAP,
        "max_steps": steps, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "learning_rate": 1e-5, **case.settings,
    }  # fmt: skip
    if ours:
        settings["packing"] = "none" if side == PADDED else "auto"
        settings["per_device_token_budget"] = TOKENS if side == BUDGET else None
    args = (BasisConfig if ours else GRPOConfig)(output_dir=f"{folder}/run", **settings)
    kinds = {TRL: CannedTrl, FIXED: CannedFixed}
    make: Any = partial(CannedBasis, baseline=case.baseline) if ours else kinds[side]
    prompts = Dataset.from_dict({"prompt": list(map(str, range(512)))})
    trainer = make(model=folder, reward_funcs=parity, args=args, train_dataset=prompts, processing_class=reads)
    trainer.spread, trainer.tokens, trainer.last = case.spread, len(reads) - 5, reads.eos_token_id
    trainer.shared_turn, trainer.group = case.turns, case.group
    return quiet(trainer)


def seconds(side: str, case: Case, folder: str, scale: Scale) -> tuple[list[float], list[dict[str, float]], float]:
    """Processor time of each step but the first, what was logged, and real tokens per padded token."""
    trainer, clock = build(side, case, folder, scale, scale.steps + 1), StepClock(time.process_time)
    trainer.add_callback(clock)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    ends = [*clock.began[2:], time.process_time()]
    times = [end - began for began, end in zip(clock.began[1:], ends, strict=True)]
    names = ("loss", "grad_norm", "entropy")
    logs = [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]
    return times, logs, trainer.real / trainer.all


def peak_bytes(side: str, case: Case, folder: str, scale: Scale) -> int:
    """Peak memory of two steps above parameters, gradients and AdamW's two moments."""
    trainer = build(side, case, folder, scale, 2)
    gc.collect()
    with LiveBytes() as counted:
        for parameter in trainer.model.parameters():
            counted.add(parameter)
        base = 4 * counted.live
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return counted.peak - base


def measure(case: Case, folder: str, scale: Scale) -> dict[str, Any]:
    """Times of a case and their ratios to the first side's, or peaks."""
    if case.weighed:
        return {"peak bytes": {side: peak_bytes(side, case, folder, scale) for side in case.sides}}
    rounds: dict[str, list[float]] = {side: [] for side in case.sides}
    logs: dict[str, list[dict[str, float]]] = {}
    density = 0.0
    for number in range(scale.rounds):
        first = number % len(case.sides)
        for side in [*case.sides, *case.sides][first : first + len(case.sides)]:
            times, logs[side], density = seconds(side, case, folder, scale)
            rounds[side].append(median(times))
    base = case.sides[0]
    ratios = {
        f"{other} / {side}": sorted(a / b for a, b in zip(rounds[other], rounds[side], strict=True))
        for other, side in ((base, each) for each in case.sides[1:])
    }
    if FIXED in rounds:
        pairs = zip(rounds[FIXED], rounds[PACKED], strict=True)
        ratios[f"{FIXED} / {PACKED}"] = sorted(a / b for a, b in pairs)
    differences = {
        side: max(abs(a[name] - b[name]) for a, b in zip(logs[base], logs[side], strict=True) for name in a)
        for side in case.sides[1:]
    }
    return {"real / padded": density, "seconds": rounds, "ratios": ratios, "largest difference": differences}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    parser = parser_of(__doc__)
    # On a processor without instructions for it, bf16 is hundreds of times slower than float32.
    usual = [name for name, case in CASES.items() if not case.settings.get("bf16")]
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=usual)
    chosen = parser.parse_args(argv)
    scale = QUICK if chosen.quick else Scale()
    one_thread()
    results = {}
    for name in chosen.only:
        with tempfile.TemporaryDirectory() as folder:
            found = results[name] = measure(CASES[name], folder, scale)
        if not chosen.quick:
            save("step_cost", {**_earlier(), **results})
        print(f"{name}:", flush=True)
        if "peak bytes" in found:
            print(", ".join(f"{side} {size / 1e6:.0f} MB" for side, size in found["peak bytes"].items()), flush=True)
            continue
        print(f"  real tokens / padded tokens: {found['real / padded']:.2f}")
        for pair, values in found["ratios"].items():
            print(f"  {pair}: {median(values):.2f} [{values[0]:.2f} to {values[-1]:.2f}]")
        of_side = (f"{side} {median(times):.2f} s" for side, times in found["seconds"].items())
        print(f"  a step: {', '.join(of_side)}")
        print(f"  largest difference in a log: {found['largest difference']}", flush=True)
    return results


def _earlier() -> dict[str, Any]:
    """Cases that an earlier run has measured."""
    path = RESULTS / "step_cost.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    return {name: found for name, found in kept.items() if name in CASES}


if __name__ == "__main__":
    main()
