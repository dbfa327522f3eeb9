"""Rows of a micro-batch laid end to end in one row without padding, with the prefixes that they share only once.

B rows of L columns, of which a mask says what is a token, become M tokens in S segments. A segment is a run of
neighbours; it attends causally to itself, and wholly to the segments above it, at most two: what all rows begin with,
and below it what the rows of one group begin with. A prefix ends one token before the rows part, so that each of the M
tokens is followed by one token only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A prefix is computed once where that saves at least so many tokens: attention to it costs more than to neighbours.
LEAST_SAVED = 16
SEGMENT_COLUMNS = 6


@dataclass(frozen=True)
class Packing:
    """Where the tokens of ``(B, L)`` rows are in one row of M.

    Attributes:
        source: ``(M,)`` index of each packed token in the flattened ``(B * L)`` rows.
        positions: ``(M,)`` place of each packed token in its own row, from 0.
        segments: ``(S, 6)`` int32: begin and end of the segment, of the prefix of all, and of the group's prefix, in
            the packed row; 0, 0 where there is none.
        scored: ``(K,)`` index in the flattened ``(B * L)`` rows of each token that is scored.
        before: ``(K,)`` place in the packed row of the token before it, which predicts it.
        shape: ``(B, L)``.
    """

    source: Tensor
    positions: Tensor
    segments: Tensor
    scored: Tensor
    before: Tensor
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


def pack_rows(ids: Tensor, mask: Tensor, scored: Tensor, *, share: bool) -> Packing:
    """The packing of rows, deterministic in its arguments.

    Rows of which nothing is scored are left out; where there is no other, one token stays, so that a model is called
    with something. The order of rows is kept, except that rows of one group come together.

    Args:
        ids: ``(B, L)`` tokens.
        mask: ``(B, L)``, 1 on tokens, 0 on padding.
        scored: ``(B, L)``, 1 on tokens whose prediction is asked for. A row's first token has none before it, so it is
            not scored.
        share: whether prefixes before the first scored token that rows share are computed once.
    """
    columns = [row.nonzero()[:, 0].tolist() for row in mask.bool().cpu()]
    wanted = (scored.bool() & mask.bool()).cpu().tolist()
    tokens = ids.tolist()
    rows: list[tuple[int, list[int], int]] = []
    for row, places in enumerate(columns):
        first = next((at for at, column in enumerate(places) if at and wanted[row][column]), None)
        if first is not None:
            # The last token before the first scored one is repeated in each row, since another token follows it there.
            rows.append((row, places, first - 1 if share else 0))
    layout = _Layout(ids.shape[1])
    prompts = [tuple(tokens[row][column] for column in places[:end]) for row, places, end in rows]
    everyone = _common(prompts) if (len(rows) - 1) * _common(prompts) >= LEAST_SAVED else 0
    outer = layout.add(rows[0], 0, everyone, []) if everyone else None
    # Without sharing each row is a group of its own.
    groups: dict[tuple[int, ...] | int, list[int]] = {}
    for at, prompt in enumerate(prompts):
        groups.setdefault(prompt if share else at, []).append(at)
    for members in groups.values():
        begin = everyone
        above = [outer]
        end = rows[members[0]][2]
        if (len(members) - 1) * (end - begin) >= LEAST_SAVED:
            above.append(layout.add(rows[members[0]], begin, end, above))
            begin = end
        for at in members:
            layout.add(rows[at], begin, len(rows[at][1]), above, wanted[rows[at][0]])
    # All ranks of a sharded model must call it, also one without a token to score.
    if not rows:
        layout.add((0, [0], 0), 0, 1, [])
    return layout.packing(tuple(ids.shape), ids.device)


def _common(prompts: Sequence[tuple[int, ...]]) -> int:
    """Length of the longest prefix of all."""
    if not prompts:
        return 0
    # What the first and the last in lexicographic order have in common, all between them have.
    lowest = min(prompts)
    highest = max(prompts)
    pairs = zip(lowest, highest, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(lowest), len(highest)))


class _Layout:
    """The packed row as it grows."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.source: list[int] = []
        self.positions: list[int] = []
        self.segments: list[list[int]] = []
        self.scored: list[int] = []
        self.before: list[int] = []

    def add(
        self,
        row: tuple[int, list[int], int],
        begin: int,
        end: int,
        above: Sequence[tuple[int, int] | None],
        wanted: Sequence[bool] | None = None,
    ) -> tuple[int, int]:
        """Append tokens `begin` to `end` of a row below the segments `above`; the segment's own place."""
        number, places, _ = row
        start = len(self.source)
        self.source += [number * self.length + column for column in places[begin:end]]
        self.positions += range(begin, end)
        # The first token is not scored: it is there to predict the first one that is.
        for at in range(begin + 1, end):
            if wanted is not None and wanted[places[at]]:
                self.scored.append(number * self.length + places[at])
                self.before.append(start + at - begin - 1)
        own = (start, len(self.source))
        spans = [own, *(span for span in above if span is not None)]
        flat = [bound for span in spans for bound in span]
        self.segments.append(flat + [0] * (SEGMENT_COLUMNS - len(flat)))
        return own

    def packing(self, shape: tuple[int, ...], device: torch.device) -> Packing:
        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return Packing(
            source=tensor(self.source),
            positions=tensor(self.positions),
            segments=torch.tensor(self.segments, dtype=torch.int32),
            scored=tensor(self.scored),
            before=tensor(self.before),
            shape=(shape[0], shape[1]),
        )


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
