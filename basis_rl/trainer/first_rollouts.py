"""If all rewards of a run's first rollouts are equal, explains what those rollouts show about the reason; a run without
any ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from basis_rl.data import problem_text
from basis_rl.rewards.base import GoldChecker
from basis_rl.rewards.extract import completion_text, last_boxed
from basis_rl.run.errors import RewardFailed

# If the rewards of so many rollouts are all equal, that is worth a message.
FIRST = 64
# Characters of a prompt and of a rollout that the message quotes.
_SHOWN = 1000


class Rollout(NamedTuple):
    """A prompt, what the model made of it, its token ids, and whether the length limit cut it off."""

    prompt: Any
    completion: Any
    token_ids: Sequence[int]
    truncated: bool


def reads_boxes(functions: Sequence[Any]) -> bool:
    """Whether some reward function reads the answer from a box."""
    checkers = [function for function in functions if isinstance(function, GoldChecker)]
    places = [getattr(each, "place", getattr(each, "answer_in", None)) for each in checkers]
    return "box" in places


def explanation(
    rewards: Sequence[float], rollouts: Sequence[Rollout], limit: int | None, functions: Sequence[Any]
) -> str | None:
    """The message if all rewards are equal: what the rollouts show about the reason, and one of them. None if not.

    Args:
        rewards: of all ranks; NaN where there is none.
        rollouts: of one of them.
        limit: max_completion_length.
        functions: the reward functions.
    """
    scored = {reward for reward in rewards if not math.isnan(reward)}
    if len(scored) > 1:
        return None
    texts = [completion_text(rollout.completion) for rollout in rollouts]
    boxes = reads_boxes(functions)
    signs = {
        "no text": [not text.strip() for text in texts],
        "no \\boxed{}, from which the answer is read": [boxes and last_boxed(text) is None for text in texts],
        f"cut off (max_completion_length {limit})": [rollout.truncated for rollout in rollouts],
    }
    # A sign that less than half of the rollouts show does not explain why all rewards are equal.
    found = [f"{name}: {sum(rows)} of {len(rows)}" for name, rows in signs.items() if 2 * sum(rows) > len(rows)]
    names = ", ".join(getattr(each, "__name__", type(each).__name__) for each in functions)
    what = f"are {min(scored):g}" if scored else f"are None, since no function scored a rollout ({names})"
    unseen = "the problems may be too hard, or too easy" if scored else "look for what makes the function return None"
    why = "; ".join(found) or f"they have text and an end, so {unseen}"
    prompt = problem_text(rollouts[0].prompt) or str(rollouts[0].prompt)
    return (
        f"All rewards of the first {len(rewards)} rollouts {what}: there is nothing to learn from until they differ. "
        f"What they show: {why}. One of them:\n--- prompt\n{prompt[-_SHOWN:]}\n--- rollout\n{texts[0][:_SHOWN]}\n---"
    )


class FirstRollouts:
    """Collects the first `FIRST` rollouts of a process, and explains them once if all their rewards are equal."""

    def __init__(self, limit: int | None, functions: Sequence[Any]) -> None:
        self.limit = limit
        self.functions = functions
        self.rewards: list[float] = []
        self.rollouts: list[Rollout] = []
        self.done = False

    def add(self, rewards: Tensor, rollouts: Sequence[Rollout]) -> str | None:
        """Take in a batch: the rewards of all ranks, ``(N,)``, and this rank's rollouts. Returns the explanation.

        Raises:
            RewardFailed: no function has scored any of the first rollouts.
        """
        if self.done:
            return None
        self.rewards += rewards.tolist()
        self.rollouts += rollouts
        told = self._explained()
        self.done = told is None or len(self.rewards) >= FIRST
        if self.done:
            self.require_scores()
        return told if self.done else None

    def require_scores(self) -> None:
        """Raise RewardFailed if there were rollouts, and no function has scored any: call it when the run ends, too."""
        if self.rewards and all(map(math.isnan, self.rewards)):
            raise RewardFailed(str(self._explained()))

    def _explained(self) -> str | None:
        return explanation(self.rewards, self.rollouts, self.limit, self.functions)
