"""The peak of a training step on a CPU, by torch's own count of its allocations, against `basis-rl check`'s estimate.

    python -m benchmarks.memory_estimate

One process, float32, transformers' sdpa attention without padding. Without Triton the fused LM head scores prompts too,
and makes several copies of its tokens x vocabulary tile, neither of which is in the estimate for a GPU. The vocabulary
is small here, so that the copies hardly matter; the prompts' share of the tile does, some 30 MiB.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config
from trl import ModelConfig
from trl.trainer.utils import add_fused_lm_head

from basis_rl.estimate.footprint import model_size
from basis_rl.estimate.memory import Setting, memory_parts, peak

MIB = float(1 << 20)
ROWS, PROMPT, COMPLETION = 4, 64, 448
CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=False,
)


def measured(checkpointing: bool) -> float:
    """Largest number of bytes allocated at a time, from the model's construction to the second step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa").train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if checkpointing:
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(0, CONFIG.vocab_size, (ROWS, PROMPT + COMPLETION))
        labels = ids.masked_fill(torch.arange(PROMPT + COMPLETION) < PROMPT, -100)
        for _ in range(
            2
        ):  # the second has moments already; its gradients are accumulated, as with several micro-batches
            model(ids, labels=labels, fused_lm_head=True).loss.backward()
            optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    live = highest = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        highest = max(highest, live)
    return float(highest)


def main() -> None:
    """Estimate beside measurement, printed."""
    size = model_size(CONFIG, ModelConfig(model_name_or_path="benchmark"))
    for checkpointing in (False, True):
        setting = Setting(
            rows=ROWS, prompt=PROMPT, completion=COMPLETION, checkpointing=checkpointing, attention="flash_attention_2"
        )
        estimate, found = peak(memory_parts(size, setting)), measured(checkpointing)
        print(
            f"checkpointing {checkpointing!s:5}: estimated {estimate / MIB:7.1f} MiB, measured {found / MIB:7.1f} MiB, "
            f"{estimate / found - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
