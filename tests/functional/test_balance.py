"""Rows divided among ranks and micro-batches: each once, within the budget, and ranks about equal."""

import pytest
import torch

from basis_rl.functional.balance import Row, divide, spreads
from basis_rl.functional.packing import pack_rows
from tests.functional.test_pack_rows import ragged


def spread(rows, parts):
    return min(spreads(dict(enumerate(rows)), parts), key=lambda way: way[0].tokens)


def random_rows(seed, size, group, system=0):
    """Rows of prompts with `group` rollouts each, as tensors and as costs; prompts begin with `system` equal tokens."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(mean, count):
        return (torch.randn(count, generator=generator).exp() * mean).long().clamp(1, 300).tolist()

    prompts, lengths = [], drawn(20, size)
    for number, own in enumerate(drawn(15, -(-size // group))):
        prompts += [[7] * system + [10 + number] * own] * group
    prompts = prompts[:size]
    rows = [
        Row(at // group, len(prompt) - 1, n + 1) for at, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return ragged(prompts, lengths), rows


@pytest.mark.parametrize("system", [0, 1, 40])
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 90, 400, 10**6])
def test_every_row_is_in_one_micro_batch_which_is_within_the_budget_as_it_is_packed(budget, ranks, group, system):
    tensors, rows = random_rows(budget + ranks, 24, group, system)
    found = divide(rows, ranks, budget)
    assert found == divide(rows, ranks, budget)
    assert len(found) == ranks
    assert len({len(parts) for parts in found}) == 1, "as many calls of the model on every rank"
    assert sorted(row for parts in found for part in parts for row in part) == list(range(24))
    for part in (part for parts in found for part in parts if part):
        packed = pack_rows(*(tensor[part] for tensor in tensors), share=True)
        assert len(packed.source) <= budget or len(part) == 1
    if budget == 10**6:
        assert [len(parts) for parts in found] == [1] * ranks


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_about_as_many_tokens(ranks, group):
    for seed in range(5):
        _, rows = random_rows(seed, 64, group)
        tokens = [part.tokens for part in spread(rows, ranks)]
        longest = max(row.own + row.common for row in rows)
        assert max(tokens) - sum(tokens) / ranks <= longest
        assert tokens == sorted(tokens, reverse=True)


def test_groups_stay_together_where_they_balance():
    rows = [Row(at // 4, 50, 10) for at in range(16)]
    parts = spread(rows, 2)
    assert all(len({rows[number].group for number in part.rows}) == 2 for part in parts)
    assert [part.tokens for part in parts] == [2 * (50 + 16 + 40)] * 2


def test_a_group_is_cut_where_one_rank_would_have_it_all():
    parts = spread([Row(0, 20, 100)] * 8, 2)
    assert sorted(len(part.rows) for part in parts) == [4, 4]


def test_rows_that_are_not_computed_cost_nothing():
    rows = [Row(number, 0, 0) for number in range(6)]
    assert [len(parts) for parts in divide(rows, 2, 10)] == [1, 1]
    assert divide([Row(0, 3, 9)], 2, 5) == [[[0]], [[]]]
