"""How far is the memory estimate of `basis-rl check` from the peak that torch counts on a CPU?

    python -m benchmarks.memory_estimate [--quick]

Measured with one process, in float32, with transformers' sdpa attention. Rows go through the model as in a training on
a CPU: without padding, and with the LM head of `basis_rl.trainer.head`. No two prompts begin alike, so that nothing is
shared, as the estimate assumes.

Results are only printed.
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from trl import ModelConfig
from trl.trainer.utils import add_fused_lm_head

from basis_rl.estimate.footprint import model_size
from basis_rl.estimate.memory import Setting, memory_parts, peak
from basis_rl.trainer import BasisConfig
from basis_rl.trainer.packing import Scorer, enable_packing
from benchmarks.common import parser_of, peak_bytes
from benchmarks.trainers import qwen3_config

MIB = float(1 << 20)
CONFIG = qwen3_config(256, 512, 6, 8, num_key_value_heads=2)
QUICK = qwen3_config(256, 64, 2, 2)


def two_steps(config: Qwen3Config, setting: Setting) -> None:
    """Build the model and run two steps.

    The second step already has the optimizer's moments, and its gradients are accumulated, as with several
    micro-batches.
    """
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if setting.checkpointing:
        model.gradient_checkpointing_enable()
    args = BasisConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none")
    score = Scorer(model, enable_packing(model, args))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    length = setting.prompt + setting.completion
    ids = torch.randint(0, config.vocab_size, (int(setting.rows), length))
    labels = ids.masked_fill(torch.arange(length) < setting.prompt, -100)
    for _ in range(2):
        score(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True).loss.backward()
        optimizer.step()


def main(argv: list[str] | None = None) -> dict[bool, tuple[float, float]]:
    """Print and return the estimated and measured bytes, without and with gradient checkpointing."""
    config = QUICK if parser_of(__doc__).parse_args(argv).quick else CONFIG
    size = model_size(config, ModelConfig(model_name_or_path="benchmark"))
    results = {}
    for checkpointing in (False, True):
        setting = Setting(
            rows=4, prompt=64, completion=448, checkpointing=checkpointing, scoring="packed", cpu=True,
            compact_head=True,
        )  # fmt: skip
        estimate = peak(memory_parts(size, setting))
        found = float(peak_bytes(partial(two_steps, config, setting)))
        results[checkpointing] = estimate, found
        print(
            f"checkpointing {checkpointing!s:5}: estimated {estimate / MIB:7.1f} MiB, measured {found / MIB:7.1f} MiB, "
            f"{estimate / found - 1:+.1%}"
        )
    return results


if __name__ == "__main__":
    main()
