"""Batches and value tables for tests of equations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable


def batch_of(
    rewards: Tensor | Sequence[float],
    ids: Sequence[str] | None = None,
    groups: Tensor | Sequence[int] | None = None,
    **fields: Any,
) -> RolloutBatch:
    """A batch of rollouts with two action tokens each.

    Without `groups` each rollout has a prompt of its own. Without `ids` prompts are named after their groups: p0, p1.
    """
    scored = torch.as_tensor(rewards)
    group_ids = torch.arange(len(scored)) if groups is None else torch.as_tensor(groups)
    fields.setdefault("action_mask", torch.ones((len(scored), 2), dtype=torch.bool))
    names = [f"p{group}" for group in group_ids.tolist()] if ids is None else list(ids)
    return RolloutBatch(rewards=scored, group_ids=group_ids, prompt_ids=names, **fields)


def table_of_counts(num_rollouts: int = 8) -> ValueTable:
    """A value table in which ``i`` of the rollouts of prompt ``p{i}`` are right."""
    counts = range(num_rollouts + 1)
    return ValueTable.from_rewards({f"p{i}": [1.0] * i + [0.0] * (num_rollouts - i) for i in counts})
