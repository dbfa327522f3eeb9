"""How weights get to the engine: settings, and the folder that both sides see where there is no NCCL."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Bounds the memory for copies: a file is written as soon as they have so many bytes.
_SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class SyncSettings:
    """How weights get to the engine, and how exactly they must arrive.

    Attributes:
        transfer: ``nccl`` (TRL's) or ``folder``.
        folder: None is a place in this machine's shared memory.
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


def sizes_of(config: Any) -> dict[str, Any]:
    """The sizes by which two text models are told apart."""
    return {
        name: getattr(config, name, None) for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    }


def part_of(folder: Path) -> Path:
    """Where the weights are while they are being written."""
    return folder.with_name(f".{folder.name}.part")


def default_folder(url: str) -> Path:
    """A folder in this machine's shared memory, one for each user and server."""
    # Without shared memory, a folder in the user's cache.
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(torch.hub.get_dir()).parent
    return root / f"basis-rl-{os.getuid()}" / url.split("//")[-1].replace(":", "-").replace("/", "-")
