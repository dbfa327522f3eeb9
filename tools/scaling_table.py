"""Which Qwen3 fits which GPUs, with which keys: the table of `docs/scaling.md`, by the estimate that `check` prints.

python -m tools.scaling_table        # writes the page
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import Qwen3Config
from trl import ModelConfig

from basis_rl import BasisConfig
from basis_rl.baselines import NoBaseline
from basis_rl.estimate.footprint import model_size, planned, read_launch
from basis_rl.estimate.memory import Launch, ModelSize, kv_cache
from basis_rl.estimate.report import Footprint, memory
from basis_rl.run.disk import GIB
from basis_rl.text import markdown_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
MARKS = "<!-- table: python -m tools.scaling_table -->\n\n", "\n\n<!-- end of table -->"
HEAD = ["GPUs", "trained", "largest Qwen3", "keys", "needs on each GPU"]
# Hidden size, intermediate size, layers, heads, and whether head and embeddings are one; the rest is the same for all.
MODELS = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}
# How many, and how many GiB each has.
GPUS = ((1, 24), (1, 48), (1, 80), (2, 80), (4, 80), (8, 80))
LORA = {"use_peft": True, "lora_r": 32, "lora_target_modules": ["all-linear"]}
TRAINED: dict[str, dict[str, Any]] = {"all weights": {}, "LoRA": LORA}
PROMPT, COMPLETION, ROWS, SEQUENCES = 512, 2048, 4, 16
# GiB on each GPU that the estimate does not count: the CUDA context and NCCL.
APART = 2.0


def config_of(name: str) -> Qwen3Config:
    hidden, inner, layers, heads, is_tied = MODELS[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    shape = {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    return Qwen3Config(**sizes, **shape, tie_word_embeddings=is_tied, max_position_embeddings=40_960)


def launches(count: int) -> Iterator[tuple[str, Launch]]:
    """The option of the command, and what it starts; the simplest first."""
    if count == 1:
        yield "", Launch()
        return
    for name in ("ddp", "zero3"):
        yield f"`--accelerate_config {name} --num_processes {count}`", read_launch(name, count)


@functools.cache
def size_of(name: str, trained: str) -> ModelSize:
    return model_size(config_of(name), ModelConfig(model_name_or_path=name, **TRAINED[trained]))


def needed(name: str, trained: str, launch: Launch, gib: int, tensor_parallel: int) -> tuple[float, float] | None:
    """vLLM's share of a GPU and the GiB that `check` finds; None if it does not fit."""
    size = size_of(name, trained)
    served = 2 * size.parameters + kv_cache(size, SEQUENCES, PROMPT + COMPLETION, 2, 2)
    share = math.ceil(20 * served / tensor_parallel / (gib * GIB)) / 20
    weights = 16 * size.trainable + 2 * (size.parameters - size.trainable)
    if share > 0.9 or weights / (launch.world if launch.stage == 3 else 1) > gib * GIB:
        return None
    model = ModelConfig(
        model_name_or_path=name, dtype="bfloat16" if trained == "LoRA" else "float32", **TRAINED[trained]
    )
    given: dict[str, Any] = {
        "per_device_train_batch_size": ROWS,
        "max_completion_length": COMPLETION,
        "num_generations": 1,
    }
    given |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "bf16": True}
    given |= {"vllm_tensor_parallel_size": tensor_parallel, "vllm_gpu_memory_utilization": share}
    with planned(launch):
        args = BasisConfig("unused", **given)
    run = Footprint(model, args, config_of(name), launch, PROMPT, gib, NoBaseline())
    warnings: list[str] = []
    said = memory(run, warnings.append)
    total = float(re.findall(r"total at the most demanding phase +([\d.]+) GiB", said)[0])
    return (share, total) if not warnings and total + APART <= gib else None


def row(count: int, gib: int, trained: str) -> list[str]:
    """The largest model that fits, by the simplest launch and the fewest GPUs for each vLLM."""
    for name in reversed(MODELS):
        for option, launch in launches(count):
            for tensor_parallel in (size for size in (1, 2, 4, 8) if size <= count):
                found = needed(name, trained, launch, gib, tensor_parallel)
                if found is None:
                    continue
                share, total = found
                keys = [option] if option else []
                keys += [f"`vllm_tensor_parallel_size: {tensor_parallel}`"] if tensor_parallel > 1 else []
                keys += [f"`vllm_gpu_memory_utilization: {share:g}`"]
                return [f"{count} x {gib} GiB", trained, name, ", ".join(keys), f"{total:.0f} GiB"]
    return [f"{count} x {gib} GiB", trained, "none", "", ""]


def table() -> str:
    return markdown_table([row(*gpus, trained) for gpus in GPUS for trained in TRAINED], HEAD)


if __name__ == "__main__":
    text = PAGE.read_text()
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    PAGE.write_text(f"{before}{MARKS[0]}{table()}{MARKS[1]}{after}")
