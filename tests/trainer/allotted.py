"""Run by `test_footprint.py` under `accelerate launch`: what a rank of a DeepSpeed run holds after a step, in bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from basis_rl.__main__ import leave
from tests.support.tiny import tiny_tokenizer, tiny_trainer

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def count(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main(precision: str, output: Path) -> None:
    tokenizer = tiny_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    own = {"model": Qwen3ForCausalLM(Qwen3Config(**SHAPE, **ids)), "processing_class": tokenizer}
    trainer = tiny_trainer(output, "grpo", max_steps=1, steps_per_generation=1, bf16=precision == "bf16", **own)
    trainer.train()
    sharded = trainer.model_wrapped.optimizer
    weights = [getattr(p, "ds_tensor", p) for p in trainer.model.parameters()]
    master = getattr(sharded, "fp32_partitioned_groups_flat", None) or sharded.single_partition_of_fp32_groups
    own = {w.untyped_storage().data_ptr() for w in weights}
    found = {
        "weights": count(weights),
        "optimizer: float32 weights": count(m for m in master if m.untyped_storage().data_ptr() not in own),
        "optimizer: moments": count(
            state[key] for state in sharded.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
        ),
    }
    if getattr(sharded, "grad_partitions_flat_buffer", None) is not None:
        found["gradients"] = count([sharded.grad_partitions_flat_buffer])
    (output / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    leave(0)
