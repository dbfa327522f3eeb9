"""What does a step with `otb` cost beside the same step with `grpo`?   python -m benchmarks.otb_step

A Qwen3 of some millions of parameters with random weights, two updates a batch (so that TRL computes the old
log-probabilities anyway), transformers generation, one CPU thread. Both sides in one run, alternating; a figure is the
median over the steps of a round, the ratio that of two neighbouring rounds.
"""

from __future__ import annotations

import tempfile
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.trainer_callback import PrinterCallback

from basis_rl import BasisConfig, BasisTrainer
from benchmarks.common import save
from examples.quickstart.warm_start import build_tokenizer

ROUNDS, STEPS = 5, 4


def parity(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def seconds(baseline: str, folder: str) -> list[float]:
    """Time of each optimizer step that generates, scoring and both updates' share included."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(["1 + 2 ="] * 10, vocab_size=300)
    config = Qwen3Config(
        vocab_size=16_384,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    trainer = BasisTrainer(
        model=Qwen3ForCausalLM(config),
        reward_funcs=parity,
        args=BasisConfig(
            output_dir=folder,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=1,
            steps_per_generation=2,
            num_generations=8,
            max_completion_length=32,
            max_steps=2 * STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{i} + 1 =" for i in range(256)]}),
        processing_class=tokenizer,
        baseline=baseline,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    times = [row["step_time"] for row in trainer.state.log_history if "step_time" in row]
    return [first + second for first, second in zip(times[2::2], times[3::2], strict=True)]  # the first is a warm-up


def main() -> None:
    torch.set_num_threads(1)
    rounds: dict[str, list[list[float]]] = {"grpo": [], "otb": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for baseline, kept in rounds.items():
                kept.append(seconds(baseline, folder))
    ratios = sorted(median(o) / median(g) for g, o in zip(rounds["grpo"], rounds["otb"], strict=True))
    for baseline, kept in rounds.items():
        print(
            f"{baseline}: {median(t for times in kept for t in times):.3f} s for a batch of 32 x 32 tokens, two updates"
        )
    print(f"otb / grpo: {median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f} over {ROUNDS} rounds")
    save("otb_step", {"seconds": rounds, "ratios": ratios})


if __name__ == "__main__":
    main()
