"""Failures of the scoring itself: counted separately from wrong answers; if they are frequent, the run ends."""

from __future__ import annotations

from collections import deque


class RewardInfrastructureError(RuntimeError):
    """Rewards cannot be trusted to come: not what the model wrote is to blame, but what scores it."""


class FailureMonitor:
    """Ends a run in which more than a share `limit` of the recent rollouts could not be scored.

    A rollout that is not scored has advantage 0; when there are many, training continues with a part of its data, and
    not a random one. Raised when more than ``limit * max(n, minimum)`` of the last n rollouts failed, n about
    `window`: with the defaults 6 failures in a row, or 51 among 1,000, and never 1 of 10.

    Every rank counts its own rollouts, and raises by itself; the launcher ends the other ranks when one has died.

    Args:
        limit: share of the rollouts, in [0, 1).
        window: rollouts that are looked back upon; whole batches, so that one of more than that is seen whole.
        minimum: fewer rollouts are judged as if they were that many, the missing ones scored.
        name: whose failures, for the message.

    Raises:
        ValueError: a parameter out of its range.
    """

    def __init__(self, limit: float = 0.05, window: int = 1000, minimum: int = 100, name: str = "The reward") -> None:
        if not 0 <= limit < 1 or not 0 < minimum <= window:
            raise ValueError(
                f"FailureMonitor needs 0 <= limit < 1 and 0 < minimum <= window, got {limit}, {minimum}, {window}."
            )
        self.limit, self.window, self.minimum, self.name = limit, window, minimum, name
        self._batches: deque[tuple[int, int]] = deque()
        self._rollouts, self._failed = 0, 0

    def record(self, scored: int, failed: int, why: str = "") -> None:
        """Count a batch: `scored` rollouts that were scored, `failed` ones that should have been and were not.

        Args:
            scored: rollouts.
            failed: rollouts.
            why: what is known of the failures, for the message.

        Raises:
            RewardInfrastructureError: too many of the recent rollouts failed.
        """
        self._batches.append((scored + failed, failed))
        self._rollouts += scored + failed
        self._failed += failed
        while self._rollouts - self._batches[0][0] >= self.window:
            rollouts, gone = self._batches.popleft()
            self._rollouts -= rollouts
            self._failed -= gone
        if failed and self._failed > self.limit * max(self._rollouts, self.minimum):
            raise RewardInfrastructureError(
                f"{self.name} could not score {self._failed} of the last {self._rollouts} rollouts, more than "
                f"{self.limit:.0%}, and this is not the model's doing{f' ({why})' if why else ''}. Look for too little "
                "memory, an overloaded machine or a broken installation, or take fewer grading processes; then resume "
                "from the last checkpoint."
            )
