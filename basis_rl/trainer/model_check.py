"""Checks of the model as it is saved, and once it is loaded, before anything is generated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from transformers import AutoProcessor, AutoTokenizer
from trl.trainer.utils import get_config_model_id

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


def processor_of(model: str | nn.Module, args: BasisConfig) -> Any:
    """The tokenizer or processor that TRL loads where none is given, so that the checks of the data know it."""
    return AutoProcessor.from_pretrained(
        model if isinstance(model, str) else get_config_model_id(model.config),
        revision=(args.model_init_kwargs or {}).get("revision"),
        truncation_side="left",
        padding_side="left",
        trust_remote_code=args.trust_remote_code,
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
