"""Packed rows: every token is there with its place and all that it may see, and scores come back to their rows."""

import itertools

import pytest
import torch

from basis_rl.functional.packing import LEAST_SAVED, pack_rows, window_order


def ragged(prompts, lengths, seed=0):
    """Rows of `prompts`, padded on the left, and of completions of those lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    longest, tokens = max(map(len, prompts)), max(lengths)
    ids = torch.zeros(len(prompts), longest + tokens, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        completion = torch.randint(100, 200, (length,), generator=generator)
        ids[row, longest - len(prompt) : longest + length] = torch.cat([torch.tensor(prompt), completion])
        mask[row, longest - len(prompt) : longest + length] = 1
    scored = mask.clone()
    scored[:, :longest] = 0
    return ids, mask, scored


SYSTEM = list(range(1, 31))
PROMPTS = [SYSTEM + [40 + i] * (20 + i) for i in (0, 0, 1, 2, 2, 2)]
LENGTHS = [5, 1, 9, 0, 3, 7]
CASES = {
    "groups below a system message": (PROMPTS, LENGTHS),
    "no group": (PROMPTS[::2], LENGTHS[::2]),
    "nothing in common": ([[7] * 5, [8] * 9, [9] * 2], [4, 2, 6]),
    "one row": (PROMPTS[:1], [3]),
    "one prompt": (PROMPTS[3:], [3, 2, 8]),
    "a prompt that is the beginning of another": ([SYSTEM, SYSTEM + [50] * 20, SYSTEM + [50] * 20], [2, 3, 4]),
    "prompts of one token": ([[5], [5], [6]], [30, 2, 3]),
    "rows without a token": (PROMPTS[:3], [0, 4, 0]),
    "no token at all": (PROMPTS[:3], [0, 0, 0]),
}


def visible(packing, ids):
    """For each packed token the tokens that it sees, itself last, read from the segments alone."""
    tokens = packing.pack(ids)[0].tolist()
    seen = {}
    for own_begin, own_end, *above in packing.segments.tolist():
        before = [tokens[at] for begin, end in (above[:2], above[2:]) for at in range(begin, end)]
        for at in range(own_begin, own_end):
            assert at not in seen, "a token is in one segment only"
            seen[at] = before + tokens[own_begin : at + 1]
    assert sorted(seen) == list(range(len(tokens)))
    return seen


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_each_scored_token_sees_its_own_row_and_nothing_else(case, share):
    ids, mask, scored = ragged(*CASES[case])
    packing = pack_rows(ids, mask, scored, share=share)
    seen = visible(packing, ids)
    found = {}
    for place, flat in zip(packing.before.tolist(), packing.scored.tolist(), strict=True):
        row, column = divmod(flat, ids.shape[1])
        found[row, column] = seen[place]
        assert int(packing.positions[place]) == len(seen[place]) - 1
    expected = {}
    for row, column in scored.nonzero().tolist():
        expected[row, column] = [int(ids[row, at]) for at in range(column) if mask[row, at]]
    assert found == expected


@pytest.mark.parametrize("case", CASES)
def test_labels_and_scores_come_back_to_their_rows(case):
    ids, mask, scored = ragged(*CASES[case])
    packing = pack_rows(ids, mask, scored, share=True)
    labels = packing.labels(ids)
    assert labels.shape == packing.pack(ids).shape
    returned = packing.unpack(labels + 1000)
    assert torch.equal(returned, torch.where(scored.bool(), ids + 1000, 0)[:, 1:])
    assert int((labels != -100).sum()) == int(scored.sum())


@pytest.mark.parametrize("case", CASES)
def test_what_rows_share_is_there_once(case):
    ids, mask, scored = ragged(*CASES[case])
    rows = [row for row in range(len(ids)) if scored[row].any()]
    alone = pack_rows(ids, mask, scored, share=False)
    shared = pack_rows(ids, mask, scored, share=True)
    assert len(alone.source) == max(1, int(mask[rows].sum()))
    starts = {row: [int(t) for t in ids[row][mask[row].bool()]] for row in rows}
    ends = {row: int((mask[row].bool() & ~scored[row].bool()).sum()) - 1 for row in rows}
    distinct = {tuple(starts[row][: at + 1]) for row in rows for at in range(ends[row])}
    saved = sum(ends.values()) - len(distinct)
    assert len(alone.source) - len(shared.source) <= saved
    if case in ("groups below a system message", "no group", "one prompt"):
        assert len(alone.source) - len(shared.source) > saved / 2 > LEAST_SAVED / 2


def test_gradients_of_scores_reach_each_token_once():
    ids, mask, scored = ragged(*CASES["groups below a system message"])
    packing = pack_rows(ids, mask, scored, share=True)
    packed = torch.randn(1, len(packing.source), requires_grad=True)
    weights = torch.randn(ids.shape[0], ids.shape[1] - 1)
    (packing.unpack(packed) * weights).sum().backward()
    expected = torch.zeros(len(packing.source))
    for place, flat in zip(packing.before.tolist(), packing.scored.tolist(), strict=True):
        row, column = divmod(flat, ids.shape[1])
        expected[place] += weights[row, column - 1]
    torch.testing.assert_close(packed.grad[0], expected)


def test_padding_has_no_influence():
    ids, mask, scored = ragged(*CASES["groups below a system message"])
    packing = pack_rows(ids, mask, scored, share=True)
    other = pack_rows(torch.where(mask.bool(), ids, 77), mask, scored, share=True)
    for name in ("source", "positions", "segments", "scored", "before"):
        assert torch.equal(getattr(packing, name), getattr(other, name))


@pytest.mark.parametrize(("rows", "parts"), [(16, 4), (8, 8), (12, 1), (12, 3)])
def test_parts_are_of_equal_size_balanced_and_a_permutation(rows, parts):
    generator = torch.Generator().manual_seed(rows)
    lengths = (10 * torch.randn(rows, generator=generator).exp()).long().add(1).tolist()
    order = window_order(lengths, range(rows), parts)
    assert sorted(order) == list(range(rows))
    assert order == window_order(lengths, range(rows), parts)
    size = rows // parts
    loads = [sum(lengths[row] for row in order[at : at + size]) for at in range(0, rows, size)]
    plain = [sum(lengths[at : at + size]) for at in range(0, rows, size)]
    assert max(loads) <= max(max(plain), sum(loads) / parts + max(lengths))


def test_balance_is_that_of_the_best_division_within_a_third():
    lengths = [31, 7, 22, 5, 18, 9, 27, 3]
    order = window_order(lengths, range(8), 2)
    heavier = max(sum(lengths[row] for row in part) for part in (order[:4], order[4:]))
    best = min(
        max(sum(lengths[row] for row in part), sum(lengths) - sum(lengths[row] for row in part))
        for part in itertools.combinations(range(8), 4)
    )
    assert heavier <= 4 / 3 * best


def test_groups_stay_together_where_they_fit():
    groups = [0, 1, 2, 3] * 4
    lengths = [10 + row for row in range(16)]
    order = window_order(lengths, groups, 2)
    assert {frozenset(groups[row] for row in part) for part in (order[:8], order[8:])} == {
        frozenset(pair) for pair in ([groups[row] for row in order[:8]], [groups[row] for row in order[8:]])
    }
    assert all(len({groups[row] for row in part}) == 2 for part in (order[:8], order[8:]))
    # A group of five in parts of four: four stay together.
    order = window_order([1] * 8, [0, 0, 0, 0, 0, 1, 1, 1], 2)
    assert sorted([[0, 0, 0, 0, 0, 1, 1, 1][row] for row in order[:4]]) in ([0, 0, 0, 0], [0, 1, 1, 1])
