"""Checks of the model as it is saved, and once it is loaded, before anything is generated."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from transformers import AutoTokenizer

from basis_rl.run.checkpoint import is_broken
from basis_rl.trainer.config import BasisConfig

_logger = logging.getLogger(__name__)


def check_saved(name: str, tokenizer: Any = None) -> None:
    """A folder `name` holds whole weights, and a tokenizer that tells texts apart: one is loaded if none is given.

    Raises:
        ValueError: it does not. A name that is no folder is not checked, except for the `tokenizer`.
    """
    folder = Path(name)
    if folder.is_dir():
        weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
        if not weights:
            raise ValueError(f"model_name_or_path: the folder '{name}' holds no weights (*.safetensors, *.bin).")
        if broken := [path.name for path in weights if is_broken(path)]:
            raise ValueError(
                f"model_name_or_path: {', '.join(broken)} in '{name}' cannot be read: a copy or download of the file "
                "was cut off. Fetch it again."
            )
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(name)
    # Without its files transformers makes a tokenizer that knows no text.
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if inner is not None and inner("1 + 1 =")["input_ids"] == inner("What is 12 - 7?")["input_ids"]:
        raise ValueError(
            f"model_name_or_path: '{name}' has no tokenizer: all texts give the same tokens. Save it beside the "
            "weights, with tokenizer.save_pretrained."
        )


def check_trained(model: nn.Module) -> None:
    """Some parameter is trained.

    Raises:
        ValueError: all are frozen, as in an adapter that was loaded for inference.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "No parameter of the model is trained: all are frozen (requires_grad is False). Load an adapter with "
            "PeftModel.from_pretrained(..., is_trainable=True), or pass peft_config for a new one."
        )


def copy_reference(accelerator: Accelerator, model: nn.Module, reference: Any) -> None:
    """Copy the weights of `model` into the KL reference; only warn if the reference is sharded already.

    TRL loads the reference from the path that `model` was loaded from, but the object may have changed since.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        _logger.warning(
            "The KL reference is what lies at '%s', not the model object as it was given. Save a changed model, and "
            "train from its path.",
            getattr(getattr(model, "config", None), "_name_or_path", ""),
        )
        return
    accelerator.unwrap_model(reference).load_state_dict(model.state_dict())


def refuse_sharded_reference(args: BasisConfig) -> None:
    """Raise ValueError if checkpoints are to hold a reference that changes, which is sharded here."""
    if args.sync_ref_model and args.save_strategy != "no":
        raise ValueError(
            "sync_ref_model with DeepSpeed or FSDP: the reference is not in the checkpoints, so that a resumed run "
            "would have that of the beginning. Set sync_ref_model to false, or save_strategy to no."
        )


def warn_of_rounding(model: nn.Module, learning_rate: float) -> None:
    """Say that updates of weights in 16 bits are mostly rounded away, where no float32 copy of them is kept."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    # Eight or eleven bits of precision: a small update is less than the rounding of a weight.
    if kinds & {torch.bfloat16, torch.float16}:
        _logger.warning("%s", rounding_note(str(min(map(str, kinds))).removeprefix("torch."), learning_rate))


def rounding_note(dtype: str, learning_rate: float) -> str:
    """What happens to weights of `dtype`."""
    return (
        f"dtype is {dtype}, and no float32 copy of the weights is kept: updates at a learning rate like "
        f"{learning_rate:g} are mostly rounded away. Set dtype: float32 (bf16 is autocast then), or train with "
        "DeepSpeed or FSDP."
    )


def operations_per_second(kind: torch.dtype, size: int = 512) -> float:
    """Of this processor, measured on a product of two matrices: in milliseconds, or some tenths of a second where it
    has no such numbers, which shows nowhere else as surely."""
    left = torch.ones(size, size, dtype=kind)
    # The first product prepares the kernel.
    torch.mm(left, left[:, :8])
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        torch.mm(left, left[:, : size // 8])
        seconds.append(time.perf_counter() - began)
    return 2 * size * size * (size // 8) / min(seconds)


def slow_half_note(args: BasisConfig) -> str:
    """What to do on a processor that computes in 16 bits more slowly than in float32; empty where it does not."""
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    if half is None or not args.use_cpu:
        return ""
    slower = operations_per_second(torch.float32) / operations_per_second(half)
    key = "bf16" if args.bf16 else "fp16"
    if slower <= 1.0:
        return ""
    return f"{key} takes {slower:.1f} times as long as float32 on this processor (measured). Set {key}: false."
