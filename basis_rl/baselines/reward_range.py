"""What beliefs about the value of prompts share: a value table that starts them, and the range of the rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from basis_rl.baselines.optimal import Ends, TargetedBaseline
from basis_rl.rewards.base import checked_range
from basis_rl.types import RunContext
from basis_rl.values.table import ValueTable

# Rewards are float32, and a range may be given in more digits.
_SLACK = 1e-6


class RewardRange:
    """``(low, high)`` of the rewards. Beliefs hold values on a scale on which the range is (0, 1).

    A range that the user fixes stays; rewards outside count as its nearer end. A range that a value table or the reward
    functions declare is where it starts, else it is learnt: `widen` extends it to the rewards of a batch after the
    policy was updated on that batch, so that the scale of a rollout does not depend on its own reward. The range is
    known once two different rewards were seen.

    Args:
        owner: who asks, for messages.
        fixed: by the user.
        declared: by a value table.

    Raises:
        ValueError: `fixed` is not two finite numbers, the smaller one first.
    """

    def __init__(self, owner: str, fixed: Sequence[float] | None = None, declared: Ends | None = None) -> None:
        self.fixed = None if fixed is None else checked_range(f"{owner}: fixed_range", fixed)
        self.ends = self.fixed or declared

    @property
    def known(self) -> bool:
        return self.ends is not None and self.ends[0] < self.ends[1]

    @property
    def known_ends(self) -> Ends | None:
        return self.ends if self.known else None

    @property
    def span(self) -> Ends:
        """``(low, high)``; (0, 1) until it is known."""
        return self.ends if self.ends is not None and self.known else (0.0, 1.0)

    def declare(self, ends: Ends | None) -> None:
        """Start with the range that the reward functions declare, unless another one is known."""
        self.ends = self.ends or ends

    def scaled(self, rewards: Tensor) -> Tensor:
        """``(N,)`` float64 in [0, 1]; NaN stays."""
        low, high = self.span
        return ((rewards.double() - low) / (high - low)).clamp(0.0, 1.0)

    def unscaled(self, values: Tensor) -> Tensor:
        """Values of the scale from 0 to 1 in reward units."""
        low, high = self.span
        return low + (high - low) * values

    def widen(self, rewards: Tensor) -> Ends | None:
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
        # Until two different rewards were seen, no belief has learnt anything that would have to be rescaled.
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


class RangedBelief(TargetedBaseline):
    """A baseline that believes something about the values of prompts, on a `RewardRange`; a value table may start it.

    Class attributes, which are parameters of subclasses:
        values: a table, its folder or Hub id, or None.
        accept_mismatch: use the table although it was built for another model, template, reward or sampling.
        fixed_range: of the rewards, by the user; see `RewardRange`.
    """

    values: ValueTable | str | Path | None = None
    accept_mismatch: bool = False
    fixed_range: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.values = self.table = None if self.values is None else ValueTable.of(self.values)
        declared = None if self.table is None else self.table.reward_range
        self.range = RewardRange(type(self).__name__, self.fixed_range, declared)

    @property
    def reward_range(self) -> Ends:
        return self.range.span

    def tabled(self, table: ValueTable, smoothing: float) -> Tensor:
        """``(P,)`` float64: values of the table's prompts, which live on its range, on the scale of this one."""
        low, high = table.reward_range
        values = table.tilt(table.prompt_ids, smoothing)(torch.tensor([torch.inf]))[0][0]
        return self.range.scaled(low + (high - low) * values)

    def validate(self, run: RunContext) -> None:
        self.range.declare(run.reward_range)
        if self.table is not None:
            self.table.check(run, accept_mismatch=self.accept_mismatch)
