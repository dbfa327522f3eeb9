"""Rewards of a batch: a failing reward function becomes one message on every rank; batches that teach nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn

from basis_rl.rewards.call import failure, is_coroutine, scores_of
from basis_rl.run.errors import RewardFailed

_WARN_AFTER = 10
_logger = logging.getLogger(__name__)


class RewardGuard:
    """Wraps reward functions so that a failure on one rank is raised on every rank, instead of leaving them waiting.

    TRL gathers rewards in a collective. A function that fails returns zeros to it, and `check` raises afterwards.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._failures: list[tuple[str, BaseException | None]] = []
        # Of the last call of each function: its rollouts' rewards by turn, empty where it gave none.
        self._by_turn: list[list[list[float]]] = []

    def guarded(self, functions: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """The functions as TRL is to call them; modules (reward models) are left as they are."""
        self._by_turn = [[] for _ in functions]
        return [
            function if isinstance(function, nn.Module) else self._guarded(index, name, function)
            for index, (name, function) in enumerate(zip(names, functions, strict=True))
        ]

    def turn_rewards(self, size: int) -> list[list[list[float]]]:
        """Of each of the `size` rollouts that were scored last, F lists: by function the rewards of its turns."""
        return [list(row) for row in zip(*(each or [[]] * size for each in self._by_turn), strict=True)]

    def _read(self, index: int, returned: Any, size: int) -> list[float]:
        scores, self._by_turn[index] = scores_of(returned, size)
        return scores

    def _guarded(self, index: int, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if is_coroutine(function):

            async def later(**given: Any) -> list[float]:
                try:
                    return self._read(index, await function(**given), len(given["completions"]))
                except Exception as error:
                    return self._failed(name, error, len(given["completions"]))

            return later

        def now(**given: Any) -> list[float]:
            try:
                return self._read(index, function(**given), len(given["completions"]))
            except Exception as error:
                return self._failed(name, error, len(given["completions"]))

        return now

    def _failed(self, name: str, error: Exception, size: int) -> list[float]:
        self._failures.append((failure(name, error), error))
        return [0.0] * size

    def check(self) -> None:
        """To be called on every rank after the rewards were gathered.

        Raises:
            RewardFailed: a function failed on some rank; the first failure is named, others are counted.
        """
        mine = self._failures
        accelerator = self.accelerator
        self._failures = []
        messages = [f"{message}, on rank {accelerator.process_index}" for message, _ in mine]
        if messages := gather_object(messages):
            more = f" ({len(messages) - 1} more such failure(s) in this batch.)" if len(messages) > 1 else ""
            raise RewardFailed(f"{messages[0]}.{more}") from (mine[0][1] if mine else None)


def total_rewards(rewards_per_func: Tensor, weights: Tensor, names: Sequence[str] = ()) -> Tensor:
    """``r_i = sum_f w_f r_if`` over the functions that scored row i; NaN where none did. ``(N, F), (F,) -> (N,)``.

    Args:
        rewards_per_func: NaN where a function did not score.
        weights: of the functions.
        names: of the functions, for the message.

    Raises:
        RewardFailed: a reward or a sum is infinite. An infinite reward would make its group's advantages NaN or, where
            those are replaced, silently 0.
    """
    parts = rewards_per_func * weights.to(rewards_per_func.device)
    total = parts.nansum(dim=1)
    # A weight of 0 or two infinities would make NaN, so the sum alone does not show every infinite reward.
    infinite = torch.cat([rewards_per_func, parts, total[:, None]], dim=1).isinf().any(dim=1).nonzero()
    if len(infinite):
        row = int(infinite[0])
        named = names or [f"function {index}" for index in range(len(weights))]
        shown = ", ".join(
            f"{name} {float(reward):g} x weight {float(weight):g}"
            for name, reward, weight in zip(named, rewards_per_func[row], weights, strict=True)
        )
        raise RewardFailed(f"The reward of row {row} of the batch is infinite: {shown}. Bound that reward.")
    return total.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


class UniformRewards:
    """Counts generation batches in a row from which nothing can be learnt: all rewards equal, or none there.

    After ten of them one warning says so. With ``max_uniform_batches`` the run ends after as many.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.in_a_row = 0
        self.warned = False

    def check(self, rewards: Tensor) -> None:
        """Count a batch of rewards, ``(N,)``, NaN where there is none.

        Raises:
            RewardFailed: ``max_uniform_batches`` in a row.
        """
        scored = rewards[~rewards.isnan()]
        if scored.numel() and float(scored.min()) != float(scored.max()):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        what = f"all rewards were {float(scored[0]):g}" if scored.numel() else "no rollout could be scored (all None)"
        since = f"In {self.in_a_row} generation batches in a row {what}: there was nothing to learn from"
        if self.most is not None and self.in_a_row >= self.most:
            raise RewardFailed(f"{since} (max_uniform_batches). Look at the reward function and at its columns.")
        if self.in_a_row >= _WARN_AFTER and not self.warned:
            self.warned = True
            if PartialState().is_main_process:
                _logger.warning("%s. Look at some rollouts, the reward function and its columns.", since)

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "warned": self.warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row = int(state["in_a_row"])
        self.warned = bool(state["warned"])
