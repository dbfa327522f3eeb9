"""Run by `test_footprint.py` under `accelerate launch`: the bytes that a rank holds between a backward pass and its step."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
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
BUCKET = 1000  # elements: DeepSpeed's own is larger than this model


def held() -> int:
    """Bytes of all storages that live, each once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def train(accelerator: Accelerator) -> int:
    """A step, and a backward pass after it: the optimizer has its moments, and the gradients are there."""
    torch.manual_seed(0)
    before = held()
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = BUCKET
    model, optimizer = accelerator.prepare(model, optimizer)
    backward = accelerator.backward if plugin is None else model.backward
    for last in (False, True):
        ids = torch.randint(0, 512, (2, 16))
        backward(model(input_ids=ids, labels=ids).loss)
        if not last:
            (optimizer if plugin is None else model).step()
            optimizer.zero_grad()
    del ids
    buffers = sum(x.numel() * x.element_size() for x in model.buffers())
    return held() - before - buffers


def main(output: Path) -> None:
    accelerator = Accelerator(cpu=True)
    (output / f"rank{accelerator.process_index}.json").write_text(json.dumps(train(accelerator)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
