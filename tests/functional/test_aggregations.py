"""The aggregations, against plain loops over ragged masks."""

import pytest
import torch

from basis_rl.functional.objectives import AGGREGATIONS, aggregate

MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0]])
STEP_TOKENS, LONGEST, MICRO_BATCHES = 21.0, 7, 3


def losses():
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_hand(per_token, aggregation):
    rows = [[float(x) for x, kept in zip(*row, strict=True) if kept] for row in zip(per_token, MASK, strict=True)]
    total, tokens = sum(map(sum, rows)), sum(map(len, rows))
    each = {
        "rollout_mean": sum(sum(row) / max(1, len(row)) for row in rows) / len(rows),
        "rollout_sum": total / len(rows),
        "micro_batch_mean": total / tokens,
        "fixed_length": total / (len(rows) * LONGEST),
    }
    return total / STEP_TOKENS if aggregation == "token_mean" else each[aggregation] / MICRO_BATCHES


def ours(per_token, aggregation, mask=MASK):
    tokens = torch.tensor(STEP_TOKENS)
    return aggregate(per_token, mask, aggregation, accumulation=MICRO_BATCHES, max_length=LONGEST, tokens=tokens)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregation_is_the_plain_loop(aggregation):
    assert float(ours(losses(), aggregation)) == pytest.approx(by_hand(losses(), aggregation), rel=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, -1e30])
def test_what_is_masked_has_no_influence(rubbish, aggregation):
    gradients = []
    for fill in (0.0, rubbish):
        per_token = torch.where(MASK.bool(), losses(), fill).requires_grad_()
        value = ours(per_token, aggregation)
        assert float(value.detach()) == pytest.approx(by_hand(losses(), aggregation), rel=1e-12)
        gradients.append(torch.autograd.grad(value, per_token)[0])
    assert torch.equal(*gradients)
    assert (gradients[1][MASK == 0] == 0).all()


def test_a_micro_batch_without_action_tokens_is_0():
    for aggregation in AGGREGATIONS:
        assert float(ours(losses(), aggregation, torch.zeros_like(MASK))) == 0.0
