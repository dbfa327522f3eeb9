"""Gathers the rows of all ranks into one batch, which every rank sees, and takes a rank's rows out of it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from basis_rl.identity import row_id
from basis_rl.types import SIGNALS, RolloutBatch


def prompt_ids_of(dataset: Any, reads: Collection[str] | None) -> list[str] | None:
    """The ids of all rows in their order (`row_id`); None for a stream, which is not read twice."""
    if not isinstance(dataset, Dataset):
        return None
    names = set(dataset.column_names)
    if "prompt_id" in names and None not in (own := list(dataset["prompt_id"])):
        return [str(name) for name in own]
    if reads is not None and "prompt" in names:
        names &= {"prompt", "prompt_id", *reads}
    return [row_id(row, reads) for row in dataset.select_columns(sorted(names))]


def gather_batch(
    accelerator: Accelerator,
    *,
    rewards: Tensor,
    prompt_ids: Sequence[str],
    action_mask: Tensor,
    group_ids: Tensor,
    step: int,
    signals: Mapping[str, Any],
) -> RolloutBatch:
    """The global batch, on CPU, the same on every rank.

    Args:
        accelerator: gathers.
        rewards: ``(N,)``, already global, in rank-major order.
        prompt_ids: of this rank's rollouts.
        action_mask: this rank's ``(N / ranks, T')``; T' differs between ranks.
        group_ids: ``(N,)``, already global. The rollouts of a prompt stand next to each other in the global order, and
            a group may straddle two ranks.
        step: index of the generation batch.
        signals: optional fields of `RolloutBatch` by name: those of shape ``(N, T)`` as this rank has them, shaped like
            `action_mask`; all others already global. None stays None.
    """
    mask = gather_tokens(accelerator, action_mask.to(torch.uint8)).bool()
    gathered = dict(signals)
    for name, value in signals.items():
        if isinstance(value, Tensor):
            whole = gather_tokens(accelerator, value.float()) * mask if SIGNALS[name] == "NT" else value
            gathered[name] = whole.float().cpu()
    ids: list[str] = gather_object(list(prompt_ids))
    return RolloutBatch(
        rewards=rewards.float().cpu(),
        group_ids=group_ids,
        prompt_ids=ids,
        action_mask=mask,
        step=step,
        **gathered,
    )


def gather_tokens(accelerator: Accelerator, values: Tensor) -> Tensor:
    """``(N / ranks, T')`` of each rank -> ``(N, T)`` on CPU, padded with 0 to the longest of all ranks."""
    gathered: Tensor = accelerator.gather(accelerator.pad_across_processes(values, dim=1))
    return gathered.cpu()


def gather_rows(accelerator: Accelerator, rows: Tensor, values: Tensor) -> Tensor:
    """``(N, T)`` on CPU in the order of `rows`, the numbers of each rank's ``(B,)`` of them; B may differ between
    ranks, and -1 is the number of what is no row."""
    numbers, found = (
        gather_tokens(accelerator, accelerator.pad_across_processes(each, dim=0, pad_index=-1))
        for each in (rows, values)
    )
    return found[numbers >= 0][numbers[numbers >= 0].argsort()]


def local_rows(values: Tensor, accelerator: Accelerator, rows: int, tokens: int) -> Tensor:
    """This rank's ``(rows,)`` or ``(rows, tokens)`` of the global values, ``(N,)`` or ``(N, T)``, as float32."""
    start = accelerator.process_index * rows
    local = values[start : start + rows]
    if local.ndim == 2:
        local = local[:, :tokens]
    return local.to(device=accelerator.device, dtype=torch.float32)
