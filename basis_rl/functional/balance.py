"""Rows divided into parts of about equal cost: among ranks, and among the micro-batches of each rank.

A part costs the tokens that go through the model: of each row its own ones, and what the rows of one prompt have in
common only once (`basis_rl.functional.packing.pack_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from basis_rl.functional.packing import LEAST_SAVED


class Row(NamedTuple):
    """The tokens of a row.

    Attributes:
        group: the same number for rows of one prompt.
        common: tokens that rows of the group have in common, so that a part computes them once.
        own: all others.
    """

    group: int
    common: int
    own: int


class Part(NamedTuple):
    """Rows by their numbers, and what they cost at most."""

    tokens: int
    rows: list[int]


def _pieces(members: Sequence[int], rows: Mapping[int, Row], most: float) -> Iterator[Part]:
    """A group cut into pieces that have at most so many tokens, or are single rows."""
    piece = Part(0, [])
    own = 0
    for number in members:
        row = rows[number]
        count = len(piece.rows) + 1
        # What rows have in common is computed once, unless that saves fewer than LEAST_SAVED tokens: then it is
        # repeated, which costs less than LEAST_SAVED tokens more.
        tokens = own + row.own + min(count * row.common, row.common + LEAST_SAVED)
        if piece.rows and tokens > most:
            yield piece
            piece = Part(0, [])
            own = 0
            tokens = row.own + row.common
        own += row.own
        piece = Part(tokens, [*piece.rows, number])
    yield piece


def spreads(rows: Mapping[int, Row], parts: int, most: float = math.inf) -> list[list[Part]]:
    """Ways to lay `rows` by number into so many parts, each with its largest part first.

    The largest piece of a group is placed first, each where the fewest tokens are (the longest-processing-time rule).
    In the first way pieces are groups; in each further one they are half as large, until they are rows. Deterministic.

    Args:
        rows: by number.
        parts: how many; some may stay empty.
        most: tokens above which pieces are cut from the beginning.
    """
    groups: dict[int, list[int]] = {}
    for number, row in rows.items():
        groups.setdefault(row.group, []).append(number)
    ways = []
    while True:
        pieces = [piece for members in groups.values() for piece in _pieces(members, rows, most)]
        found = [Part(0, []) for _ in range(parts)]
        for piece in sorted(pieces, key=lambda piece: (-piece.tokens, piece.rows)):
            at = min(range(parts), key=lambda at: found[at].tokens)
            found[at] = Part(found[at].tokens + piece.tokens, found[at].rows + piece.rows)
        ways.append(sorted(found, reverse=True))
        if len(pieces) == len(rows):
            return ways
        most = max(piece.tokens for piece in pieces if len(piece.rows) > 1) / 2


def divide(rows: Sequence[Row], ranks: int, budget: int) -> list[list[list[int]]]:
    """For each rank the rows in each of its micro-batches, as many on every rank, and as few as are found.

    Ranks have about equal tokens, not equal numbers of rows. A micro-batch has at most `budget` tokens unless it is a
    single row. Ranks wait for each other after each micro-batch, so the least time is the least sum of the largest of
    each place.
    """
    shares = min(spreads(dict(enumerate(rows)), ranks), key=lambda way: way[0].tokens)
    count = max(1, *(math.ceil(sum(min(rows[at].own, budget) for at in part.rows) / budget) for part in shares))
    while True:
        of_ranks = [spreads({at: rows[at] for at in part.rows}, count, budget) for part in shares]
        # Pieces of about the same size on all ranks.
        ways = [[ways[min(at, len(ways) - 1)] for ways in of_ranks] for at in range(max(map(len, of_ranks)))]
        fitting = [way for way in ways if all(part.tokens <= budget or len(part.rows) == 1 for part in chain(*way))]
        if fitting:
            # The time of a step: what the largest of each place takes, one after the other.
            best = min(fitting, key=lambda way: sum(max(same).tokens for same in zip(*way, strict=True)))
            return [[sorted(part.rows) for part in parts] for parts in best]
        count += 1
