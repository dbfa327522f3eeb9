"""pass@k as the objective: a rollout is worth what it adds to a set of k."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import CenterScale
from basis_rl.registry import check_choice

Form = Literal["analytic", "leave_one_out"]


class PassAtK(CenterScale):
    """Advantages under which training raises pass@k, the chance that one of k rollouts is right.

    ``form="analytic"`` (Chen et al. 2025, arXiv:2508.10751): with c of the group's n rollouts right, pass@k of all
    subsets of k has the mean ``rho = 1 - C(n-c, k) / C(n, k)`` and the deviation ``sigma = sqrt(rho (1 - rho))``, and a
    rollout gets the mean over the subsets that hold it::

        A_right = (1 - rho) / (sigma + eps)
        A_wrong = (1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / (sigma + eps)          eps = 1e-6

    It needs ``n > k``: with n = k the only subset is the group, and every advantage is 0. A rollout is right if its
    reward is above `threshold`.

    ``form="leave_one_out"`` (Tang et al. 2025, arXiv:2503.19595): k is the number of the group's rollouts, and a
    rollout gets what the best reward loses without it, ``A_i = max_j r_j - max_{j != i} r_j``: the best one its lead
    over the second, the others 0. No scaling. It is unbiased for ``E[max]``, for any reward.

    With KL in the reward, ``r`` is the return in ``leave_one_out``. ``analytic`` refuses it: only which side of the
    threshold a reward is on counts, so that the penalty would do nothing, or make a right rollout wrong.

    Args:
        k: size of the set, >= 1 (``analytic`` only).
        form: see above.
        threshold: in reward units (``analytic`` only).

    Raises:
        ValueError: a parameter out of its range.
    """

    uses_own_reward: bool = True
    # Of the default form and k, as the next one.
    min_group_size: int = 3
    reads_kl: bool = False
    scales: bool = True

    def __init__(self, k: int = 2, form: Form = "analytic", threshold: float = 0.5) -> None:
        check_choice("pass_at_k", "form", form, Form)
        if k < 1:
            raise ValueError(f"pass_at_k: k must be at least 1, got {k}.")
        self.k = k
        self.form = form
        self.threshold = threshold
        self.min_group_size = k + 1 if form == "analytic" else 2
        self.reads_kl = form == "leave_one_out"
        self.scales = form == "analytic"

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """``r_i - A_i``, so that what is left is the advantage."""
        values = torch.full_like(rewards, torch.nan)
        for group in group_ids.unique():
            rows = ((group_ids == group) & ~rewards.isnan()).nonzero().flatten()
            if len(rows) >= self.min_group_size:
                values[rows] = self._analytic(rewards[rows]) if self.form == "analytic" else _leads(rewards[rows])
        return rewards - values

    def _analytic(self, rewards: Tensor) -> Tensor:
        right = rewards > self.threshold
        n = len(rewards)
        c = int(right.sum())
        k = self.k
        # 1 - rho.
        fails = math.comb(n - c, k) / math.comb(n, k)
        others_fail = math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1) if c < n else 0.0
        sigma = math.sqrt(fails * (1 - fails)) + 1e-6
        return torch.where(right, fails / sigma, (fails - others_fail) / sigma).to(rewards)


def _leads(rewards: Tensor) -> Tensor:
    """``max_j r_j - max_{j != i} r_j``, of one group."""
    best = rewards.topk(2)
    lead = torch.zeros_like(rewards)
    lead[best.indices[0]] = best.values[0] - best.values[1]
    return lead
