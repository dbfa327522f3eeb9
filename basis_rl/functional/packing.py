"""Rows of a micro-batch laid end to end in one row without padding, with what they begin with in common only once.

B rows of L columns, of which a mask says what is a token, become M tokens in S segments: the nodes of a prefix tree
over the rows' tokens, scored ones included. A segment is a run of neighbours; it attends causally to itself, and wholly
to the segments above it. A row is the path from the root to a leaf, or the beginning of one. A segment that rows share
ends one token before they part, so that each of the M tokens is followed by one token only: the last token that they
have in common is repeated in each branch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Rows share a segment where that saves at least so many tokens: attention to it costs more than to neighbours.
LEAST_SAVED = 16


@dataclass(frozen=True)
class Packing:
    """Where the tokens of ``(B, L)`` rows are in one row of M.

    Attributes:
        source: ``(M,)`` index of each packed token in the flattened ``(B * L)`` rows.
        positions: ``(M,)`` place of each packed token in its own row, from 0.
        segments: ``(S, 2 * (1 + D))`` int32: begin and end of the segment in the packed row, then of those above it
            from the root downwards; 0, 0 where there are fewer than D, the most that a segment has above it.
        scored: ``(K,)`` index in the flattened ``(B * L)`` rows of each token that is scored.
        before: ``(K,)`` place in the packed row of the token before it, which predicts it; rows that share it have
            the same place.
        copies: ``(M,)`` number of rows in which each packed token stands.
        shape: ``(B, L)``.
    """

    source: Tensor
    positions: Tensor
    segments: Tensor
    scored: Tensor
    before: Tensor
    copies: Tensor
    shape: tuple[int, int]

    def pack(self, rows: Tensor) -> Tensor:
        """``(B, L)`` -> ``(1, M)``."""
        return rows.flatten()[self.source][None]

    def model_inputs(self, ids: Tensor) -> dict[str, Any]:
        """A transformer's arguments for the packed row: the segments stand in the place of the attention mask, which
        `basis_rl.trainer.attention` reads."""
        mask = self.segments[None, None]
        return {"input_ids": self.pack(ids), "position_ids": self.positions[None], "attention_mask": mask}

    def labels(self, ids: Tensor, ignored: int = -100) -> Tensor:
        """``(1, M)``: the token that follows each packed token where it is scored, else `ignored`."""
        found = torch.full((len(self.source),), ignored, dtype=ids.dtype, device=ids.device)
        found[self.before] = ids.flatten()[self.scored]
        return found[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """``(1, M, ...)`` -> ``(B, L - 1, ...)``: for each scored token but a first one what `packed` has of the token
        before it, 0 elsewhere."""
        batch, length = self.shape
        found = packed.new_zeros(batch * length, *packed.shape[2:]).index_copy(0, self.scored, packed[0, self.before])
        return found.view(batch, length, *packed.shape[2:])[:, 1:]

    def over_shared(self, values: Tensor) -> Tensor:
        """``(B, T)`` of the last T tokens of each row -> for each scored token the sum over the rows that share the
        token before it, 0 elsewhere."""
        _, length = self.shape
        rows = torch.nn.functional.pad(values, (length - values.shape[1], 0)).flatten()
        sums = values.new_zeros(len(self.source)).index_add(0, self.before, rows[self.scored])
        return self.unpack(sums[None])[:, -values.shape[1] :]


# A begin and an end for each node of a prefix tree. A node's name has the first row of each node from the root to
# itself, so that in sorted order it comes before those below it.
Nodes = dict[tuple[int, ...], tuple[int, int]]


def pack_rows(ids: Tensor, mask: Tensor, scored: Tensor, *, share: bool) -> Packing:
    """The packing of rows, deterministic in its arguments.

    Rows of which nothing is scored are left out; where there is no other, one token stays, so that a model is called
    with something. The order of rows is kept, except that rows that share a segment come together. A row that another
    one begins with adds no tokens.

    Args:
        ids: ``(B, L)`` tokens.
        mask: ``(B, L)``, 1 on tokens, 0 on padding.
        scored: ``(B, L)``, 1 on tokens whose prediction is asked for. A row's first token has none before it, so it is
            not scored.
        share: whether what rows begin with in common is computed once.
    """
    batch, length = ids.shape
    columns = [row.nonzero()[:, 0] for row in mask.bool().cpu()]
    # Places in their own row of the tokens that predict a scored one.
    asked = [row[own[1:]].nonzero()[:, 0] for row, own in zip(scored.bool().cpu(), columns, strict=True)]
    tokens = {row: own[columns[row]] for row, own in enumerate(ids.cpu()) if len(asked[row])}
    carriers = _carriers(tokens) if share else {row: row for row in tokens}
    distinct = {row: tokens[row] for row in carriers.values()}
    tree: Nodes = _tree(distinct) if share else {(row,): (0, len(own)) for row, own in distinct.items()}
    # All ranks of a sharded model must call it, also one without a token to score.
    if not tree:
        tree = {(0,): (0, 1)}
        columns[0] = torch.zeros(1, dtype=torch.int64)
    tree = dict(sorted(tree.items()))
    ends = itertools.accumulate((end - begin for begin, end in tree.values()), initial=0)
    spans: Nodes = dict(zip(tree, itertools.pairwise(ends), strict=True))
    places = _places(spans)
    nothing = torch.zeros(0, dtype=torch.int64)
    source = [path[-1] * length + columns[path[-1]][begin:end] for path, (begin, end) in tree.items()]
    found = [row * length + columns[row][1:][asked[row]] for row in tokens]
    before = [places[carriers[row]][asked[row]] for row in tokens]
    stood = [places[carriers[row]][: len(own)] for row, own in tokens.items()]
    return Packing(
        source=torch.cat(source).to(ids.device),
        positions=torch.cat([torch.arange(*node) for node in tree.values()]).to(ids.device),
        segments=_segments(spans),
        scored=torch.cat([nothing, *found]).to(ids.device),
        before=torch.cat([nothing, *before]).to(ids.device),
        copies=torch.cat([nothing, *stood]).bincount(minlength=sum(map(len, source))).to(ids.device),
        shape=(batch, length),
    )


def _segments(spans: Nodes) -> Tensor:
    """`Packing.segments` of nodes with these spans in the packed row."""
    found = torch.zeros((len(spans), 2 * max(map(len, spans))), dtype=torch.int32)
    for own, path in enumerate(spans):
        above = [path[:depth] for depth in range(1, len(path))]
        bounds = [bound for node in (path, *above) for bound in spans[node]]
        found[own, : len(bounds)] = torch.tensor(bounds, dtype=torch.int32)
    return found


def _places(spans: Nodes) -> dict[int, Tensor]:
    """For each row that has a leaf, where its tokens are in the packed row."""
    # Of the nodes whose name ends with a row, the last one is its leaf.
    leaves = {path[-1]: path for path in spans}
    return {
        row: torch.cat([torch.arange(*spans[leaf[: depth + 1]]) for depth in range(len(leaf))])
        for row, leaf in leaves.items()
    }


def _carriers(tokens: dict[int, Tensor]) -> dict[int, int]:
    """For each row the row whose path has its tokens: itself, or a longest one that begins with all of them."""
    # Bytes are compared faster than lists. Their order also puts rows with a common beginning next to each other.
    keys = {row: own.numpy().tobytes() for row, own in tokens.items()}
    found: dict[int, int] = {}
    last = -1
    # In ascending order, rows that begin with another row follow it directly. Of equal rows the first has the path.
    for row in sorted(tokens, key=lambda row: (keys[row], -row), reverse=True):
        last = last if last >= 0 and keys[last].startswith(keys[row]) else row
        found[row] = last
    return found


def _tree(tokens: dict[int, Tensor]) -> Nodes:
    """The prefix tree of rows, none of which is the beginning of another: which tokens of its first row a node has."""
    order = sorted(tokens, key=lambda row: tokens[row].numpy().tobytes())
    common = [_common(tokens[one], tokens[other]) for one, other in itertools.pairwise(order)]
    found: Nodes = {}
    # Parts of that order, from the root downwards: first, last, the node above, and how many tokens are above.
    pending: list[tuple[int, int, tuple[int, ...], int]] = [(0, len(order), (), 0)] if order else []
    while pending:
        first, last, above, begin = pending.pop()
        row = min(order[first:last])
        if last - first == 1:
            found[*above, row] = (begin, len(tokens[row]))
            continue
        shortest = min(common[first : last - 1])
        # Another token follows the last common one in each branch, so it is repeated there.
        end = shortest - 1
        if (last - first - 1) * (end - begin) >= LEAST_SAVED:
            above = (*above, row)
            found[above] = (begin, end)
            begin = end
        cuts = [at for at in range(first + 1, last) if common[at - 1] == shortest]
        pending += [(*part, above, begin) for part in itertools.pairwise([first, *cuts, last])]
    return found


def _common(one: Tensor, other: Tensor) -> int:
    """How many tokens two rows have in common before they part."""
    both = min(len(one), len(other))
    return int((one[:both] != other[:both]).nonzero()[0, 0])


def window_order(lengths: Sequence[int], groups: Sequence[int], micro_batches: int) -> list[int]:
    """An order of N rows whose consecutive `micro_batches` parts, of equal size, have about as many tokens each.

    Rows of a group stay together where a part has room for them. The longest groups are placed first, each where the
    fewest tokens are (the longest-processing-time rule). Deterministic; within a part rows keep their order.

    Args:
        lengths: tokens of each row.
        groups: a number for each row, the same for rows that share a prompt.
        micro_batches: of the optimizer step's window; it divides N.
    """
    size = len(lengths) // micro_batches
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    parts: list[list[int]] = [[] for _ in range(micro_batches)]
    load = [0] * micro_batches
    for rows in sorted(members.values(), key=lambda rows: (-sum(lengths[row] for row in rows), rows[0])):
        rest = list(rows)
        while rest:
            room = [size - len(part) for part in parts]
            fitting = [at for at in range(micro_batches) if room[at] >= len(rest)]
            # A group that fits nowhere is cut where most of it stays together.
            widest = [at for at in range(micro_batches) if room[at] == max(room)]
            at = min(fitting or widest, key=lambda at: (load[at], at))
            taken = rest[: room[at]]
            # What has no room in this part goes to the next one.
            rest = rest[room[at] :]
            parts[at] += taken
            load[at] += sum(lengths[row] for row in taken)
    return [row for part in parts for row in sorted(part)]
