"""Failures of the scoring itself: counted separately from wrong answers; if they are frequent, the run ends."""

from __future__ import annotations

from collections import deque


class RewardInfrastructureError(RuntimeError):
    """Too many rollouts could not be scored, for a reason that lies in the scoring and not in the rollouts."""


# Share of the recent rollouts that may fail.
_LIMIT = 0.05
_ADVICE = (
    "Look for too little memory, an overloaded machine or a broken installation, or take fewer grading processes; then "
    "resume from the last checkpoint."
)
# How many rollouts count as recent; since whole batches are kept, there may be more.
_WINDOW = 1000
# Fewer rollouts are judged as if they were this many, so that one failure in a small batch does not end a run.
_MINIMUM = 100


class FailureMonitor:
    """Ends a run in which more than 5 % of the recent rollouts could not be scored.

    A rollout without a score has advantage 0, so with many of them training would continue on a part of the data that
    is not random. It raises when more than ``0.05 * max(n, 100)`` of the last n rollouts failed, n about 1,000: 6
    failures in a row, or 51 among 1,000, and never 1 of 10.

    Every rank counts its own rollouts, and raises by itself; the launcher ends the other ranks when one has died.

    Args:
        name: whose failures, for the message.
        limit: the share of the recent rollouts that may fail.
        advice: what to do, for the message.
    """

    def __init__(self, name: str, limit: float = _LIMIT, advice: str = _ADVICE) -> None:
        self.name = name
        self.limit = limit
        self.advice = advice
        self._batches: deque[tuple[int, int]] = deque()

    def record(self, scored: int, failed: int, why: str = "") -> None:
        """Count a batch: `scored` rollouts have a score, and the scoring of `failed` ones failed.

        Args:
            scored: rollouts.
            failed: rollouts.
            why: what is known of the failures, for the message.

        Raises:
            RewardInfrastructureError: too many of the recent rollouts failed.
        """
        self._batches.append((scored + failed, failed))
        while sum(size for size, _ in self._batches) - self._batches[0][0] >= _WINDOW:
            self._batches.popleft()
        rollouts, gone = map(sum, zip(*self._batches, strict=True))
        if failed and gone > self.limit * max(rollouts, _MINIMUM):
            raise RewardInfrastructureError(
                f"{self.name} could not score {gone} of the last {rollouts} rollouts, more than "
                f"{self.limit:.0%}, and this is not the model's doing{f' ({why})' if why else ''}. {self.advice}"
            )
