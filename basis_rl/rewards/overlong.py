"""The soft punishment of rollouts that come near the length limit (DAPO)."""

from __future__ import annotations

from typing import Any

from basis_rl.registry import OneOrMore, checked
from basis_rl.rewards.base import Column, LogMetric, Reward, Scores, log_shares


class OverlongReward(Reward):
    r"""DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, Eq. 13), in [-1, 0], to be added to a reward:

    .. math::

        R(y) = \begin{cases}
            0 & |y| \le L_{max} - L_{cache} \\
            ((L_{max} - L_{cache}) - |y|) / L_{cache} & L_{max} - L_{cache} < |y| \le L_{max} \\
            -1 & |y| > L_{max}
        \end{cases}

    with :math:`|y|` the rollout's tokens; one that the limit cut off gets -1. DAPO has L_max 20480, L_cache 4096. With
    TRL's ``mask_truncated_completions`` ("overlong filtering") it reaches only the rollouts that ended in time.

    Metric: ``reward/overlong/share``, the share of rollouts that are punished.

    Args:
        max_completion_length: L_max in tokens; a recipe's own ``max_completion_length`` by default.
        cache: L_cache in tokens, in [1, L_max]; default: a fifth of L_max, as in DAPO, and at least 1.

    Raises:
        ValueError: a length out of its range.
    """

    __name__ = "overlong_reward"
    reward_range = (-1.0, 0.0)

    @checked("overlong")
    def __init__(self, max_completion_length: OneOrMore, cache: OneOrMore | None = None) -> None:
        self.cache = max(1, max_completion_length // 5) if cache is None else cache
        if self.cache > max_completion_length:
            raise ValueError(
                f"overlong: cache ({self.cache}) must be at most max_completion_length ({max_completion_length})."
            )
        self.max_completion_length = max_completion_length
        self.version = f"{self.max_completion_length}, cache {self.cache}"

    def __call__(
        self, prompts: Column, completions: Column, completion_ids: Column, log_metric: LogMetric = None, **kwargs: Any
    ) -> Scores:
        free = self.max_completion_length - self.cache
        log_shares(
            log_metric, "overlong", {"share": sum(len(ids) > free for ids in completion_ids)}, len(completion_ids)
        )
        return [-min(1.0, max(0, len(ids) - free) / self.cache) for ids in completion_ids]
