"""Rows of a micro-batch laid end to end in one row without padding, with the prefixes that they share only once.

B rows of L columns, of which a mask says what is a token, become M tokens in S segments. A segment is a run of
neighbours; it attends causally to itself, and wholly to the segments above it, at most two: what all rows begin with,
and below it what the rows of one group begin with. A prefix ends one token before the rows part, so that each of the M
tokens is followed by one token only.
"""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True)
class _Run:
    """The tokens `begin` to `end` of a row, laid end to end, below the runs with the numbers `above`.

    Only of a `scored` run are tokens scored, not of a prefix that rows share.
    """

    row: int
    begin: int
    end: int
    above: tuple[int, ...] = ()
    scored: bool = False


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
    wanted = (scored.bool() & mask.bool()).cpu()
    prompts: dict[int, tuple[int, ...]] = {}
    for row, (tokens, asked) in enumerate(zip(ids.tolist(), wanted.tolist(), strict=True)):
        first = next((at for at, column in enumerate(columns[row]) if at and asked[column]), None)
        if first is not None:
            # The last token before the first scored one is repeated in each row, since another token follows it there.
            prompts[row] = tuple(tokens[column] for column in columns[row][: first - 1 if share else 0])
    runs: list[_Run] = []
    top: tuple[int, ...] = ()
    everyone = _common(list(prompts.values()))
    if (len(prompts) - 1) * everyone >= LEAST_SAVED:
        runs.append(_Run(min(prompts), 0, everyone))
        top = (0,)
    else:
        everyone = 0
    # Without sharing each row is a group of its own.
    groups: dict[tuple[int, ...] | int, list[int]] = {}
    for row, prompt in prompts.items():
        groups.setdefault(prompt if share else row, []).append(row)
    for members in groups.values():
        begin = everyone
        above = top
        end = len(prompts[members[0]])
        if (len(members) - 1) * (end - begin) >= LEAST_SAVED:
            above = (*top, len(runs))
            runs.append(_Run(members[0], begin, end, top))
            begin = end
        runs += [_Run(row, begin, len(columns[row]), above, scored=True) for row in members]
    # All ranks of a sharded model must call it, also one without a token to score.
    if not runs:
        return _packed([_Run(0, 0, 1)], [[0]], wanted, ids.device)
    return _packed(runs, columns, wanted, ids.device)


def _packed(runs: Sequence[_Run], columns: Sequence[list[int]], wanted: Tensor, device: torch.device) -> Packing:
    """The packing of these runs, by the columns in which each row has tokens; `wanted` ``(B, L)`` are to be scored."""
    batch, length = wanted.shape
    source = torch.cat([run.row * length + torch.tensor(columns[run.row][run.begin : run.end]) for run in runs])
    spans = list(itertools.pairwise(itertools.accumulate((run.end - run.begin for run in runs), initial=0)))
    segments = torch.zeros((len(runs), SEGMENT_COLUMNS), dtype=torch.int32)
    may_score = torch.zeros(len(source), dtype=torch.bool)
    for own, run in enumerate(runs):
        bounds = [bound for each in (own, *run.above) for bound in spans[each]]
        segments[own, : len(bounds)] = torch.tensor(bounds, dtype=torch.int32)
        # The first token of a run is not scored: it is there to predict the first one that is.
        may_score[bounds[0] + 1 : bounds[1]] = run.scored
    copies = [
        sum(run.scored and (at == own or at in run.above) for own, run in enumerate(runs)) for at in range(len(runs))
    ]
    at_scored = (may_score & wanted.flatten()[source]).nonzero()[:, 0]
    return Packing(
        source=source.to(device),
        positions=torch.cat([torch.arange(run.begin, run.end) for run in runs]).to(device),
        segments=segments,
        scored=source[at_scored].to(device),
        before=(at_scored - 1).to(device),
        copies=torch.tensor(copies).repeat_interleave(torch.tensor([end - begin for begin, end in spans])).to(device),
        shape=(batch, length),
    )


def _common(prompts: Sequence[tuple[int, ...]]) -> int:
    """Length of the longest prefix of all."""
    if not prompts:
        return 0
    # What the first and the last in lexicographic order have in common, all between them have.
    lowest = min(prompts)
    highest = max(prompts)
    pairs = zip(lowest, highest, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(lowest), len(highest)))


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
