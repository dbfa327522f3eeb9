"""A baseline chosen for the variance of the gradient, not for its distance to the value, at any number of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from basis_rl.baselines.base import scorable_rows, where_scorable
from basis_rl.baselines.history import BasisHistory
from basis_rl.types import Advantages, RolloutBatch
from basis_rl.values.table import ValueTable


class LeastVariance(BasisHistory):
    """``A_i = r_i - b_i``, ``b_i = c_0 + c_1 V_i + c_2 V_i^2``, the c of least energy-weighted error of the OTHERS.

    The power of a rollout's gradient is ``E[(r - b)^2 |S|^2]``, S its score, least at ``b* = E[r |S|^2] / E[|S|^2]``.
    That is the value V only if right and wrong rollouts have scores of one size (`studies.score_norms`). So the value
    is corrected by a curve, the same for all prompts, that is fitted to the batch::

        c^(i) = argmin_c  sum_{j != i} W_j (r_j - c . x_j)^2 + W_mean |c - (0, 1, 0)|^2      x = (1, V, V^2)

    ``W_j = sum_t w_t`` is the rollout's energy, the squared norm of its score in the logits (OTB, Eq. 7), of the same
    forward pass. The second term draws small batches to ``b = V``. V is what `basis_history` believes before the batch,
    so ``b_i`` does not depend on ``r_i``. Values are scaled to [0, 1], ``b`` is kept within the range of rewards.

    Not from a paper: what it gains, and where it does not, is in `studies.least_variance`.

    Metrics: ``intercept``, ``slope``, ``curvature``: means of the c.

    Args:
        values: of `basis_history`: a table, its folder or Hub id, or None.
        accept_mismatch: see `Basis`.
        fixed_range: see `BasisHistory`.

    Raises:
        ValueError: see `BasisHistory`.
    """

    requires = frozenset({"energies"})

    def __init__(
        self,
        values: ValueTable | str | Path | None = None,
        accept_mismatch: bool = False,
        fixed_range: Sequence[float] | None = None,
    ) -> None:
        super().__init__(values, accept_mismatch=accept_mismatch, fixed_range=fixed_range)
        self.requires = frozenset({"energies"})

    def advantages(self, batch: RolloutBatch) -> Advantages:
        assert batch.energies is not None
        if not self.range.known:
            return self.range.until_known(batch)
        scorable = scorable_rows(batch)
        rewards = torch.where(scorable, self.range.scaled(batch.rewards), 0.0)
        energies = (batch.energies.double() * batch.action_mask).sum(dim=1) * scorable
        value = self.expected(batch.prompt_ids)
        features = torch.stack([torch.ones_like(value), value, value**2], dim=1)
        coefficients = _leave_one_out(features, rewards, energies, scorable)
        scaled = (coefficients * features).sum(dim=1).clamp(0.0, 1.0)
        baseline = self.range.unscaled(scaled)
        values = where_scorable(batch, batch.rewards.double() - baseline)
        means = coefficients.mean(dim=0).tolist()
        metrics = dict(zip(("intercept", "slope", "curvature"), means, strict=True)) | self.range.metrics()
        return Advantages(values=values, baseline=baseline, metrics=metrics)


def _leave_one_out(features: Tensor, rewards: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """``(N, 3)``: for each row the weighted least squares of all others, ridged by one row of mean weight at (0, 1, 0).

    Args:
        features: ``(N, 3)``.
        rewards: ``(N,)``.
        weights: ``(N,)`` >= 0, 0 where the row does not count.
        counts: ``(N,)`` bool, the rows that count.
    """
    outer = weights[:, None, None] * features[:, :, None] * features[:, None, :]
    moment = (weights * rewards)[:, None] * features
    others = (counts.sum() - counts.long()).clamp(min=1)
    ridge = ((weights.sum() - weights) / others).clamp(min=1e-12)
    left = outer.sum(dim=0) - outer + ridge[:, None, None] * torch.eye(3, dtype=torch.float64)
    right = moment.sum(dim=0) - moment + ridge[:, None] * torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    return torch.linalg.solve(left, right[:, :, None])[:, :, 0]
