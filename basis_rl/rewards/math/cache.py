"""Verdicts that were given already, bounded in number and in memory, the ones used last kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

Pair = tuple[str, str]
# A kind of basis_rl.rewards.math.reward.KINDS, and a detail behind a colon where it has one: unsound: chain.
Verdict = str


class Verdicts:
    """What is known of pairs (gold, answer). Safe to use from several threads.

    Args:
        entries: so many at most.
        characters: of a pair that is remembered, at most.
    """

    def __init__(self, entries: int = 200_000, characters: int = 400) -> None:
        self.entries = entries
        self.characters = characters
        self._known: OrderedDict[Pair, Verdict] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, pairs: Iterable[Pair]) -> dict[Pair, Verdict]:
        """Those of `pairs` that are known, with their verdicts; they count as used."""
        with self._lock:
            found = {pair: self._known[pair] for pair in pairs if pair in self._known}
            for pair in found:
                self._known.move_to_end(pair)
            return found

    def remember(self, verdicts: dict[Pair, Verdict]) -> None:
        """Add `verdicts`, and forget what was not used for the longest time until the bounds hold."""
        with self._lock:
            for pair, verdict in verdicts.items():
                if len(pair[0]) + len(pair[1]) <= self.characters:
                    self._known[pair] = verdict
                    self._known.move_to_end(pair)
            while len(self._known) > self.entries:
                self._known.popitem(last=False)
