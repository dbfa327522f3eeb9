"""The scale of a belief: the least and the largest reward, given or learnt from the batches before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines.base import where_scorable
from basis_rl.functional.segments import leave_one_out_mean
from basis_rl.rewards.base import checked_range
from basis_rl.types import Advantages, RolloutBatch

# Rewards are float32, and a range may be given in more digits.
_SLACK = 1e-6


class RewardRange:
    """``(low, high)`` of the rewards; a belief holds values on the scale on which it is (0, 1).

    A range that the user fixes stays, and rewards outside are taken for the nearer end. One that a value table or the
    reward functions declare is where the range starts, and without any it is learnt: `widen` takes in the rewards of a
    batch after the policy was updated on it, so that the range in which a rollout is judged does not depend on its own
    reward. It is known once two different rewards were seen.

    Args:
        owner: who asks, for messages.
        fixed: by the user.
        declared: by a value table.

    Raises:
        ValueError: `fixed` is not two finite numbers, the smaller one first.
    """

    def __init__(
        self, owner: str, fixed: Sequence[float] | None = None, declared: tuple[float, float] | None = None
    ) -> None:
        self.fixed = None if fixed is None else checked_range(f"{owner}: fixed_range", fixed)
        self.ends = self.fixed or declared

    @property
    def known(self) -> bool:
        return self.ends is not None and self.ends[0] < self.ends[1]

    @property
    def span(self) -> tuple[float, float]:
        """``(low, high)``; (0, 1) until it is known."""
        return self.ends if self.ends is not None and self.known else (0.0, 1.0)

    def declare(self, ends: tuple[float, float] | None) -> None:
        """Start with the range that the reward functions declare, unless another one is known."""
        self.ends = self.ends or ends

    def scaled(self, rewards: Tensor) -> Tensor:
        """``(N,)`` float64 in [0, 1]; NaN stays."""
        low, high = self.span
        return ((rewards.double().cpu() - low) / (high - low)).clamp(0.0, 1.0)

    def unscaled(self, values: Tensor) -> Tensor:
        """Values of the scale from 0 to 1 in reward units."""
        low, high = self.span
        return low + (high - low) * values

    def widen(self, rewards: Tensor) -> tuple[float, float] | None:
        """Take in the rewards of a batch, ``(N,)``, NaN where there is none.

        Returns:
            ``(a, b)`` if beliefs are to be rescaled: a value V of the old scale is ``a + b V`` on the new one.
        """
        scored = rewards[~rewards.isnan()].double()
        if self.fixed is not None or not len(scored):
            return None
        least = float(scored.min())
        largest = float(scored.max())
        if self.ends is None:
            self.ends = (least, largest)
            return None
        was_known = self.known
        low, high = self.ends
        slack = _SLACK * (high - low)
        self.ends = (least if least < low - slack else low, largest if largest > high + slack else high)
        if not was_known or self.ends == (low, high):
            return None
        width = self.ends[1] - self.ends[0]
        return (low - self.ends[0]) / width, (high - low) / width

    def metrics(self) -> dict[str, float]:
        low, high = self.span
        return {"range_known": float(self.known), "range_low": low, "range_high": high}

    def until_known(self, batch: RolloutBatch) -> Advantages:
        """``A_i = r_i - mean_{j != i} r_j`` over the batch, what is done until a range is known; of a single one, r."""
        rewards = batch.rewards.double().cpu()
        others = leave_one_out_mean(rewards, torch.zeros(len(rewards), dtype=torch.long))
        baseline = torch.nan_to_num(others, nan=0.0)
        values = where_scorable(batch, rewards - baseline)
        return Advantages(values=values, baseline=baseline, metrics=self.metrics())


def with_range(belief: object, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A belief's `state`; one that was saved before ranges were learnt has the one of then, the table's or (0, 1)."""
    learnt = getattr(belief, "range", None)
    return {"reward_range": learnt.span, **state} if isinstance(learnt, RewardRange) else state
