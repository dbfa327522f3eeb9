"""Aggregations of a loss by token against plain loops: ragged masks, rollouts without a token, micro-batches."""

import pytest
import torch

from basis_rl.functional.objectives import aggregate

MAX_LENGTH, ACCUMULATION, TOKENS = 9, 4.0, 23.0


def by_loops(per_token, mask, loss_type):
    rows = [[x for x, m in zip(values, kept, strict=True) if m] for values, kept in zip(per_token, mask, strict=True)]
    total = sum(sum(row) for row in rows)
    if loss_type in ("dapo", "cispo", "vespo"):
        return total / TOKENS
    if loss_type == "bnpo":
        value = total / sum(len(row) for row in rows)
    elif loss_type == "dr_grpo":
        value = total / (len(rows) * MAX_LENGTH)
    elif loss_type == "luspo":
        value = total / len(rows)
    else:
        value = sum(sum(row) / max(1, len(row)) for row in rows) / len(rows)
    return value / ACCUMULATION


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "bnpo", "dr_grpo", "luspo", "dapo", "cispo", "vespo"])
def test_aggregations_are_those_of_plain_loops(loss_type):
    generator = torch.Generator().manual_seed(0)
    per_token = torch.randn((5, 7), generator=generator, dtype=torch.float64) + 1.0
    mask = torch.tensor(
        [[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0, 0], [0] * 7, [1, 1, 1, 1, 0, 0, 0]]
    )
    found = aggregate(
        per_token,
        mask,
        loss_type,
        accumulation=ACCUMULATION,
        max_length=MAX_LENGTH,
        tokens=torch.tensor(TOKENS, dtype=torch.float64),
    )
    assert float(found) == pytest.approx(by_loops(per_token.tolist(), mask.tolist(), loss_type), rel=1e-12)
