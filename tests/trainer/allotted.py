"""Run by `test_footprint.py` under torchrun: the bytes that a rank holds after a step of DDP, DeepSpeed or FSDP2."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

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


def held() -> int:
    """Bytes of all storages that live, each once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    tensors = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def one_step(accelerator: Accelerator) -> int:
    torch.manual_seed(0)
    before = held()
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = 1
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(0, 512, (2, 16))
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    if accelerator.state.deepspeed_plugin is None:  # DeepSpeed steps within `backward`
        optimizer.step()
    return held() - before


def main(engine: str, precision: str, output: Path) -> None:
    plugins = {}
    if engine.startswith("zero"):
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=int(engine[-1]), gradient_accumulation_steps=1)
    elif engine == "fsdp":
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
    for name in plugins:  # as `accelerate launch` does
        os.environ[f"ACCELERATE_USE_{name.removesuffix('_plugin').upper()}"] = "true"
    accelerator = Accelerator(mixed_precision=precision, **plugins)
    (output / f"rank{accelerator.process_index}.json").write_text(json.dumps(one_step(accelerator)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
