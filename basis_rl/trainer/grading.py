"""Rewards of rollouts as they end, in whatever order and from many threads."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from basis_rl.rewards.call import failure, is_coroutine, reward_arguments, scores_of
from basis_rl.run.errors import RewardFailed
from basis_rl.trainer.conversation import StreamedRollout


@dataclass(eq=False)
class Entry:
    """Rollouts of one prompt, which are scored together.

    Attributes:
        row: of the dataset.
        rollouts: G of them; their `rewards`, `turn_rewards` and `logged` are filled in.
        environments: of each rollout; None without environments.
        outcome: whether all functions have scored it, or why they have not; False if it was given up, None while there
            is none.
    """

    row: Mapping[str, Any]
    rollouts: Sequence[StreamedRollout]
    environments: Sequence[Any] | None = None
    outcome: bool | RewardFailed | None = field(default=None, init=False)


class Grader:
    """Calls reward functions with whole groups, as soon as they have ended.

    A coroutine, or a function that is ``thread_safe`` or names ``environments``, is called for each group by itself, at
    the same time as for others. Every other function is called by one thread at a time, since it may not be made for
    more, with all groups that have ended by then.

    Args:
        trainer: the run, with its reward functions and the event loop of its coroutines.

    Attributes:
        turn: is held by who calls functions that are called by one thread at a time.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        functions = trainer.functions
        self._functions = list(zip(trainer.reward_func_names, functions, strict=True))
        alone = [
            is_coroutine(each)
            or getattr(each, "thread_safe", False)
            or "environments" in inspect.signature(each).parameters
            for each in functions
        ]
        self._alone = [index for index, each in enumerate(alone) if each]
        self._together = [index for index, each in enumerate(alone) if not each]
        self.turn = threading.Lock()
        self._changing = threading.Lock()
        self._waiting: list[Entry] = []
        self._called: list[Entry] = []
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def grade(self, entry: Entry) -> bool:
        """Score a group; False if it was given up.

        Raises:
            RewardFailed: a function raised an exception, or returned something else than a score for each rollout.
        """
        for rollout in entry.rollouts:
            rollout.rewards = [math.nan] * len(self._functions)
            rollout.turn_rewards = [[] for _ in self._functions]
        for index in self._alone:
            self._score(index, [entry])
        with self._changing:
            self._waiting += [entry] if entry.outcome is None else []
        while entry.outcome is None:
            turn = self.turn
            if not turn.acquire(timeout=0.5):
                continue
            try:
                # After `give_up` the turn is another lock.
                if turn is self.turn and entry.outcome is None:
                    self._score_waiting()
            finally:
                turn.release()
        if isinstance(entry.outcome, RewardFailed):
            raise entry.outcome
        return entry.outcome

    def _score_waiting(self) -> None:
        with self._changing:
            entries = self._waiting
            self._called = entries
            self._waiting = []
        outcome: bool | RewardFailed = True
        try:
            for index in self._together:
                self._score(index, entries)
        except RewardFailed as error:
            outcome = error
        with self._changing:
            for each in entries:
                each.outcome = outcome if each.outcome is None else each.outcome

    def give_up(self, entry: Entry) -> bool:
        """Wait for a group's rewards no longer, nor for those of others in a call with it that does not return. False,
        and nothing changes, if it only waits until others are scored."""
        with self._changing:
            if entry in self._waiting:
                return False
            if entry in self._called and entry.outcome is None:
                self._give_up_call()
            entry.outcome = False
            return True

    @contextmanager
    def alone(self, seconds: float) -> Iterator[None]:
        """Within it nobody else calls functions that are called by one thread at a time. A call that lasts for all of
        these seconds is given up."""
        turn = None
        while turn is None:
            turn = self._seized(seconds)
        try:
            yield
        finally:
            turn.release()

    def _seized(self, seconds: float) -> threading.Lock | None:
        """The turn, held by the caller; None if another call has begun meanwhile."""
        turn = self.turn
        called = self._called
        free = turn.acquire(timeout=seconds)
        with self._changing:
            if turn is self.turn and free:
                return turn
            if free:
                turn.release()
            elif turn is self.turn and called is self._called:
                self._give_up_call()
                self.turn.acquire()
                return self.turn
            return None

    def _give_up_call(self) -> None:
        self.turn = threading.Lock()
        for each in self._called:
            each.outcome = False if each.outcome is None else each.outcome

    def take_metrics(self) -> dict[str, list[float]]:
        """What functions have passed to ``log_metric`` since the last call."""
        with self._changing:
            found = self._metrics
            self._metrics = defaultdict(list)
        return found

    def _score(self, index: int, entries: Sequence[Entry]) -> None:
        """Fill in the rewards of one function."""
        name, function = self._functions[index]
        rows = [entry.row for entry in entries for _ in entry.rollouts]
        rollouts = [rollout for entry in entries for rollout in entry.rollouts]
        columns: dict[str, list[Any]] = {}
        cut_off = self._trainer.is_truncated
        said = [(each.completion, each.completion_ids, cut_off(each.completion_ids)) for each in rollouts]
        # Training replaces its state when it begins.
        given = reward_arguments(rows, [each.prompt for each in rollouts], said, self._trainer.state, columns)
        given["log_metric"] = self._noted
        if entries[0].environments is not None:
            given["environments"] = [each for entry in entries for each in entry.environments or []]
        try:
            returned = function(**given)
            if is_coroutine(function):
                returned = asyncio.run_coroutine_threadsafe(returned, self._trainer.async_loop).result()
            scores, by_turn = scores_of(returned, len(rollouts))
        # Also what ends a process, or cancels a coroutine: others wait for this call.
        except BaseException as error:
            raise RewardFailed(f"{failure(name, error)}.") from error
        for place, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            rollout.rewards[index] = score
            rollout.turn_rewards[index] = by_turn[place]
            rollout.logged |= {key: values[place] for key, values in columns.items() if place < len(values)}

    def _noted(self, name: str, value: float) -> None:
        with self._changing:
            self._metrics[name].append(float(value))
