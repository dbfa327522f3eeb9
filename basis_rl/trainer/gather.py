"""From what each rank holds to the one batch that every rank sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from basis_rl.data import prompt_id
from basis_rl.types import SIGNALS, RolloutBatch


def row_prompt_id(row: Mapping[str, Any]) -> str:
    """The row's ``prompt_id`` column, else the hash of its prompt; without one (an environment makes it) of the row."""
    if row.get("prompt_id") is not None:
        return str(row["prompt_id"])
    return prompt_id(row["prompt"] if "prompt" in row else repr(sorted(row.items())))


def gather_batch(
    accelerator: Accelerator,
    *,
    rewards: Tensor,
    inputs: Sequence[Mapping[str, Any]],
    action_mask: Tensor,
    num_generations: int,
    step: int,
    signals: Mapping[str, Any],
) -> RolloutBatch:
    """The global batch, on CPU, the same on every rank.

    Args:
        accelerator: gathers.
        rewards: ``(N,)``, already global, in rank-major order.
        inputs: this rank's rows of the dataset, one per rollout.
        action_mask: this rank's ``(N / ranks, T')``; T' differs between ranks.
        num_generations: G; TRL's sampler puts the G rollouts of a prompt next to each other in the global order, and a
            group may straddle two ranks.
        step: index of the generation batch.
        signals: optional fields of `RolloutBatch` by name: those of shape ``(N, T)`` as this rank has them, shaped like
            `action_mask`; all others already global. None stays None.
    """
    mask = _gather_tokens(accelerator, action_mask.to(torch.uint8)).bool()
    gathered = dict(signals)
    for name, value in signals.items():
        if isinstance(value, Tensor):
            whole = _gather_tokens(accelerator, value.float()) * mask if SIGNALS[name] == "NT" else value
            gathered[name] = whole.float().cpu()
    ids: list[str] = gather_object([row_prompt_id(row) for row in inputs])
    return RolloutBatch(
        rewards=rewards.float().cpu(),
        group_ids=torch.arange(rewards.numel()) // num_generations,
        prompt_ids=ids,
        action_mask=mask,
        step=step,
        **gathered,
    )


def _gather_tokens(accelerator: Accelerator, values: Tensor) -> Tensor:
    """``(N / ranks, T')`` of each rank -> ``(N, T)`` on CPU, padded with 0 to the longest of all ranks."""
    gathered: Tensor = accelerator.gather(accelerator.pad_across_processes(values, dim=1))
    return gathered.cpu()


def local_rows(values: Tensor, accelerator: Accelerator, rows: int, tokens: int) -> Tensor:
    """This rank's ``(rows,)`` or ``(rows, tokens)`` of the global values, ``(N,)`` or ``(N, T)``, as float32."""
    start = accelerator.process_index * rows
    local = values[start : start + rows]
    if local.ndim == 2:
        local = local[:, :tokens]
    return local.to(device=accelerator.device, dtype=torch.float32)
