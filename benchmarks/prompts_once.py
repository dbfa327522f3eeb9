"""What does it save to compute a prompt once for all of its rollouts while they are drawn?

    python -m benchmarks.prompts_once [--quick] [--model FOLDER]

64 rollouts of 8 prompts are drawn by transformers' `generate` as it is, and by `basis_rl.engine.prefill`, in turn. One
thread, autocast in bfloat16, processor time, the median of the rounds and their range. Without a model, one of six
layers with random weights is taken. Nothing is stored.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3ForCausalLM

from basis_rl.engine.prefill import sharing
from benchmarks.common import one_thread, parser_of
from benchmarks.trainers import qwen3_config

ROWS, PROMPTS = 64, 8
# Tokens of prompts and of rollouts.
LENGTHS = ((27, 12), (27, 60), (200, 60))


def seconds(generate: Any, ids: torch.Tensor, tokens: int) -> float:
    """Of one batch of rollouts, none of which ends early."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0)
    began = time.process_time()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return time.process_time() - began


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Print the table; returns the ratios of each line's rounds."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="folder of a causal language model")
    options = parser.parse_args(argv)
    one_thread()
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(qwen3_config(8_192, 256, 6, 8))
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    model.eval().generation_config = GenerationConfig()
    sides = {"generate": model.generate, "prompts once": sharing(model, model.generate)}
    found = {}
    for prompt, tokens in LENGTHS[:1] if options.quick else LENGTHS:
        ids = torch.randint(3, model.config.vocab_size, (PROMPTS, prompt)).repeat_interleave(ROWS // PROMPTS, 0)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(3 if options.quick else 5):
            for name, generate in sides.items():
                times[name].append(seconds(generate, ids, tokens))
        line = f"prompts of {prompt} tokens, rollouts of {tokens}"
        found[line] = [old / new for old, new in zip(*times.values(), strict=True)]
        shown = ", ".join(f"{name} {median(values):.1f} s" for name, values in times.items())
        ratio = f"{median(found[line]):.2f} ({min(found[line]):.2f} to {max(found[line]):.2f})"
        print(f"{line}: {shown}, ratio {ratio}", flush=True)
    return found


if __name__ == "__main__":
    main()
