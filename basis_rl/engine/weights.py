"""How weights get to the engine: settings, and the folder that both sides see where there is no NCCL."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from basis_rl.run.errors import RequestRefused

# Bounds the memory for copies: a file is written as soon as they have so many bytes.
_SHARD_BYTES = 2 << 30
# What PEFT and checkpointing add to the names of parameters.
_ADDED = "base_model.model.", ".base_layer", ".token_adapter", "modules_to_save.default.", "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class SyncSettings:
    """How weights get to the engine, and how exactly they must arrive.

    Attributes:
        transfer: ``nccl`` (TRL's) or ``folder``.
        folder: in which weights get a folder of their own; None is this machine's shared memory.
        tolerance: bound on ``rollout/sync_error``.
        request_timeout: seconds that one request may take.
        recovery_timeout: seconds to wait for a server that failed.
        fp32_head: the trained model's head is kept in float32.
        adapter: only the adapter of a LoRA policy is sent, if the server can serve it.
    """

    transfer: str
    folder: Path | None
    tolerance: float
    request_timeout: float
    recovery_timeout: float
    fp32_head: bool
    adapter: bool = False


def write_weights(folder: Path, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Write `parameters` as safetensors files; the folder appears when it is complete.

    Tensors come one at a time and may be freed after their turn (gathered shards), so at most 2 GiB of copies are held.
    """
    part = part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    held: dict[str, Tensor] = {}
    numbers = itertools.count()
    for name, parameter in parameters:
        held[name] = parameter.detach().to("cpu", copy=True).contiguous()
        if sum(tensor.nbytes for tensor in held.values()) >= _SHARD_BYTES:
            save_file(held, part / f"model-{next(numbers):05d}.safetensors")
            held = {}
    if held:
        save_file(held, part / f"model-{next(numbers):05d}.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def whole(parameter: Tensor, device: torch.device) -> Tensor:
    """A parameter, of FSDP2 gathered on `device`, which is collective."""
    value = parameter.detach()
    return cast(Any, value.to(device)).full_tensor() if isinstance(value, DTensor) else value


def merged_parameters(
    model: Any, gather: Callable[[Any], AbstractContextManager[None]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of a PEFT model with its adapters merged, as TRL's `_iter_named_params` has them, but
    without copies for another adapter, such as the reference's copy of a trained head.

    PEFT merges in place, and its `unmerge` rounds, so weights of bfloat16 would move with every push. Here one layer at
    a time is merged, a copy of the result is taken, and its weights are put back before the copy is handed over.
    Collective where parameters are sharded; the arguments are those of `PolicyAdapter`.
    """
    # An optional dependency, which a PEFT model has.
    from peft.tuners.tuners_utils import BaseTunerLayer

    model.base_model._check_merge_allowed()
    layers: dict[Tensor, list[Any]] = defaultdict(list)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for parameter in layer.get_base_layer().parameters():
                layers[parameter].append(layer)
    for name, parameter in model.named_parameters():
        # The adapter's own parameters, and what a trained copy replaces.
        if model.prefix in name or "trainable_tokens_" in name or "original_module" in name:
            continue
        changing = layers[parameter]
        needed = dict.fromkeys([parameter, *(each for layer in changing for each in layer.parameters())])
        with torch.no_grad(), gather(list(needed)):
            kept = {each: each.clone() for layer in changing for each in layer.get_base_layer().parameters()}
            try:
                for layer in changing:
                    layer.merge()
                    _require_in_place(layer, kept, name)
                merged = whole(parameter, device).clone()
            finally:
                for layer in changing:
                    layer.unmerge()
                for each, before in kept.items():
                    each.data.copy_(before)
        for part in _ADDED:
            name = name.replace(part, "")
        if "modules_to_save." not in name:
            yield name, merged


def _require_in_place(layer: Any, before: dict[Tensor, Tensor], name: str) -> None:
    """The layer's parameters are those `before` its adapter was merged.

    Raises:
        RequestRefused: they are new ones, which would be neither sent nor put back.
    """
    if any(each not in before for each in layer.get_base_layer().parameters()):
        raise RequestRefused(
            f"PEFT merges the adapter of {name} into a new, rounded parameter, as it does for quantised weights, so "
            "that vLLM cannot get merged weights. Set vllm_lora_sync: adapter, with a server, or leave load_in_4bit "
            "and load_in_8bit out."
        )


def sizes_of(config: Any) -> dict[str, Any]:
    """The sizes by which two text models are told apart."""
    return {
        name: getattr(config, name, None) for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    }


def part_of(folder: Path) -> Path:
    """Where the weights are while they are being written."""
    return folder.with_name(f".{folder.name}.part")


def folder_for(url: str, given: Path | None = None) -> Path:
    """The folder of weights for a server, which is removed when they are loaded: one of our own in the `given` one, or
    in this machine's shared memory."""
    name = url.split("//")[-1].replace(":", "-").replace("/", "-")
    if given is not None:
        # Other runs, of other machines too, may use it.
        return given / f"basis-rl-{os.getuid()}-{socket.gethostname()}-{name}"
    # Without shared memory, a folder in the user's cache.
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(torch.hub.get_dir()).parent
    return root / f"basis-rl-{os.getuid()}" / name
