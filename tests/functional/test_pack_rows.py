"""Packed rows: every token is there with its place and all that it may see, and scores come back to their rows."""

import itertools
import random

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


def turn(number, length, is_scored):
    """Tokens of a turn, the same for the same number, and whether the policy has said them."""
    chosen = random.Random(number)
    return [(chosen.randrange(1000), is_scored) for _ in range(length)]


def chain(lengths):
    """Each row has one turn more in common with those after it, then one of its own."""
    turns = [turn(number, length, number % 2) for number, length in enumerate(lengths)]
    return [[*itertools.chain(*turns[:at]), *turn(60 + at, 3, 1)] for at in range(1, len(turns) + 1)]


ASKED, CALL, HEARD = turn(0, 20, 0), turn(1, 17, 1), turn(2, 12, 0)
SECOND = ASKED + CALL + HEARD + turn(3, 9, 1) + turn(4, 11, 0)
# Rows of several turns: each token, and whether it is scored.
TREES = {
    "turns in common": [
        SECOND + turn(5, 6, 1),
        turn(9, 7, 0) + turn(10, 5, 1),
        ASKED + CALL + HEARD + turn(7, 8, 1),
        SECOND + turn(6, 3, 1),
        ASKED + turn(8, 9, 1),
        SECOND,
        turn(9, 3, 0) + turn(11, 2, 0),
    ],
    "a deep tree": chain([4, 4, 4, 4, 6, 8, 17, 2]),
    "a rollout in the prompt of others": [
        ASKED + CALL,
        ASKED + turn(1, 17, 0) + turn(2, 6, 1),
        ASKED + turn(1, 17, 0) + turn(3, 6, 1),
    ],
    "equal rollouts": [turn(0, 5, 0) + turn(1, 2, 1)] * 2 + [turn(2, 30, 1)] * 2 + [turn(0, 5, 0) + turn(1, 2, 1)],
    "tokens that one row scores": [
        ASKED + CALL + turn(3, 4, 1),
        ASKED + turn(1, 17, 0) + turn(4, 4, 1),
        turn(0, 20, 1) + CALL,
    ],
}


def laid(rows, columns, length):
    """``(B, L)`` tokens, mask and what is scored, of rows in these columns; other columns are padding."""
    ids, mask, scored = torch.zeros(3, len(rows), length, dtype=torch.int64)
    for row, (tokens, at) in enumerate(zip(rows, columns, strict=True)):
        for column, (token, is_scored) in zip(at, tokens, strict=True):
            ids[row, column] = token
            mask[row, column] = 1
            scored[row, column] = is_scored
    return ids, mask, scored


def rows_of(case):
    if case in CASES:
        return ragged(*CASES[case])
    rows = TREES[case]
    # As in a micro-batch: what comes before the first scored token is padded on the left, the rest on the right.
    prompts = [next((at for at, (_, is_scored) in enumerate(row) if at and is_scored), len(row)) for row in rows]
    starts = [max(prompts) - prompt for prompt in prompts]
    columns = [range(start, start + len(row)) for start, row in zip(starts, rows, strict=True)]
    return laid(rows, columns, max(each.stop for each in columns))


def random_rows(seed):
    """Rows that part and end anywhere, with padding anywhere."""
    chosen = random.Random(seed)
    tokens = [[] for _ in range(chosen.randint(1, 9))]
    branches = [()] * len(tokens)
    for _ in range(chosen.randint(1, 5)):
        branches = [(*branch, chosen.randrange(2)) for branch in branches]
        turns = {}
        for row, branch in enumerate(branches):
            said = [chosen.randrange(3) for _ in range(chosen.choice((1, 2, 5, 9, 20)))]
            said = turns.setdefault(branch, said) if chosen.random() < 0.9 else said
            is_scored = chosen.random() < 0.5
            if chosen.random() < 0.9:
                tokens[row] += [(token, is_scored and chosen.random() < 0.9) for token in said]
    length = max(map(len, tokens)) + chosen.randint(0, 9)
    ids, mask, scored = laid(tokens, [sorted(chosen.sample(range(length), len(row))) for row in tokens], length)
    # What padding holds, and what is said of it, has no influence.
    return torch.where(mask.bool(), ids, 7 * (seed % 3)), mask, scored | (1 - mask) * (seed % 2)


def kept_rows(ids, mask, scored):
    """The tokens of each row of which something but the first token is scored."""
    real = [mask[row].bool() for row in range(len(ids))]
    return {row: ids[row, own].tolist() for row, own in enumerate(real) if scored[row, own][1:].any()}


def visible(packing):
    """For each packed token the places of those that it sees, itself last, read from the segments alone."""
    seen = {}
    for own_begin, own_end, *above in packing.segments.tolist():
        spans = zip(above[::2], above[1::2], strict=True)
        before = [at for begin, end in spans for at in range(begin, end)]
        for at in range(own_begin, own_end):
            assert at not in seen, "a token is in one segment only"
            seen[at] = [*before, *range(own_begin, at + 1)]
    assert sorted(seen) == list(range(len(packing.source)))
    return seen


EVERY = [*CASES, *TREES]


def given(case):
    """The rows of that case, or many random ones."""
    return [random_rows(seed) for seed in range(60)] if case == "random" else [rows_of(case)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("case", [*EVERY, "random"])
def test_each_scored_token_sees_its_own_row_and_nothing_else(case, share):
    for ids, mask, scored in given(case):
        packing = pack_rows(ids, mask, scored, share=share)
        tokens = packing.pack(ids)[0].tolist()
        seen = visible(packing)
        found = {}
        for place, flat in zip(packing.before.tolist(), packing.scored.tolist(), strict=True):
            found[divmod(flat, ids.shape[1])] = [tokens[at] for at in seen[place]]
        rows = kept_rows(ids, mask, scored)
        expected = {}
        for row, column in (scored * mask).nonzero().tolist():
            before = [int(ids[row, at]) for at in range(column) if mask[row, at]]
            if before:
                expected[row, column] = before
        assert found == expected
        for places in seen.values():
            assert packing.positions[places].tolist() == list(range(len(places)))
        # What is not scored is there as well, and nothing that is in no row.
        paths = {tuple(tokens[at] for at in places) for places in seen.values()}
        beginnings = {tuple(row[: at + 1]) for row in rows.values() for at in range(len(row))}
        assert paths == (beginnings or {tuple(tokens)})


@pytest.mark.parametrize("case", [*EVERY, "random"])
def test_labels_and_scores_come_back_to_their_rows(case):
    for ids, mask, scored in given(case):
        packing = pack_rows(ids, mask, scored, share=True)
        labels = packing.labels(ids)
        assert labels.shape == packing.pack(ids).shape
        returned = packing.unpack(labels + 1000)
        # A first token has none before it.
        predicted = scored * mask * (mask.cumsum(1) > 1)
        assert torch.equal(returned, torch.where(predicted.bool(), ids + 1000, 0)[:, 1:])
        assert int((labels != -100).sum()) == len(set(packing.before.tolist()))


def tokens_of_tree(rows, least):
    """The packed tokens, by a plain loop over the tree's nodes from the root: `rows` have `begin` tokens above them."""
    distinct = {tuple(row) for row in rows}
    pending = [([row for row in distinct if not any(row == o[: len(row)] != o for o in distinct)], 0)]
    total = 0
    while pending:
        members, begin = pending.pop()
        depth = begin
        while len({row[: depth + 1] for row in members}) == 1 and depth < len(members[0]):
            depth += 1
        own = depth - (len(members) > 1)
        if len(members) == 1 or (len(members) - 1) * (own - begin) >= least:
            total += own - begin
            begin = own
        for following in {row[depth] for row in members if depth < len(row)}:
            pending.append(([row for row in members if row[depth] == following], begin))
    return total


@pytest.mark.parametrize("case", [*EVERY, "random"])
def test_what_rows_share_is_there_once(case):
    for ids, mask, scored in given(case):
        rows = kept_rows(ids, mask, scored).values()
        alone = pack_rows(ids, mask, scored, share=False)
        shared = pack_rows(ids, mask, scored, share=True)
        assert len(alone.source) == max(1, sum(map(len, rows)))
        assert len(alone.segments) == max(1, len(rows))
        assert len(shared.source) == (tokens_of_tree(rows, LEAST_SAVED) if rows else 1)


def test_rows_keep_their_order_unless_they_share():
    system = turn(0, 20, 0)
    rows = [system + turn(1, 3, 1), turn(2, 3, 1), turn(3, 20, 0) + turn(4, 3, 1), system + turn(5, 3, 1)]
    rows += [turn(3, 20, 0) + turn(6, 3, 1), turn(2, 2, 1) + turn(7, 5, 1), rows[1]]
    packing = pack_rows(*laid(rows, [range(len(row)) for row in rows], 30), share=True)
    leaves = [int(packing.source[end - 1]) // 30 for _, end, *_ in packing.segments.tolist()]
    assert leaves == [0, 0, 3, 1, 2, 2, 4, 5]


@pytest.mark.parametrize("seed", range(20))
def test_other_orders_of_rows_give_the_same_segments(seed):
    rows = random_rows(seed)

    def contents(ids, mask, scored):
        packing = pack_rows(ids, mask, scored, share=True)
        tokens = packing.pack(ids)[0].tolist()
        spans = [[tokens[begin:end] for begin, end in zip(row[::2], row[1::2], strict=True)]
                 for row in packing.segments.tolist()]  # fmt: skip
        return sorted(spans), sorted(packing.positions.tolist())

    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(seed))
    assert contents(*(each[order] for each in rows)) == contents(*rows)


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
    assert all(len({groups[row] for row in part}) == 2 for part in (order[:8], order[8:]))
    # A group of five in parts of four: four stay together.
    order = window_order([1] * 8, [0, 0, 0, 0, 0, 1, 1, 1], 2)
    assert sorted([[0, 0, 0, 0, 0, 1, 1, 1][row] for row in order[:4]]) in ([0, 0, 0, 0], [0, 1, 1, 1])
