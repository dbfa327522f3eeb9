"""BASIS: one rollout per prompt, the whole batch as the baseline (Gong et al. 2026)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import less_baseline, mean_of_others, scorable_rows, where_scorable
from basis_rl.baselines.optimal import Target, TargetedBaseline
from basis_rl.functional.basis import Weighting, beta_grid, cross_entropy, mean_squared_error, refine
from basis_rl.functional.diagnostics import mean_by
from basis_rl.registry import Bounds, NotNegative
from basis_rl.types import Advantages, RolloutBatch, RunContext
from basis_rl.values.table import ValueTable

Calibration = Literal["common", "likelihood", "literal", "none"]

# Elements of a (beta, rollout) block: small enough for the cache, and memory stays O(N) whatever the grid. Measured in
# benchmarks/advantage_cost.py.
_BLOCK = 1 << 14
_FORGETTING = 0.9
# Values are kept in ``[epsilon, 1 - epsilon]``.
Epsilon = Annotated[float, Bounds("between 0 and 0.5", lambda x: 0 < x < 0.5)]


@dataclass(eq=False)
class Basis(TargetedBaseline):
    """``A_i = r_i - b_i``, with ``b_i`` the value of prompt i as the other prompts of the batch tell it (Algorithm 1).

    1. For each candidate ``beta`` the table gives the initial value ``V_i`` of the tilted reference policy (Eq. 5).
    2. ``b_i`` refines ``V_i`` with the rewards of the other rollouts of the batch (Eqs. 7, 8, 9: `refine`).
    3. ``beta`` is the candidate that explains this batch's rewards best (`calibration`).

    A prompt is active if ``epsilon < V_i < 1 - epsilon`` (Eq. 4), V being the value of the reference policy, or with
    ``literal`` the value at that beta. Others have ``b = 0``, and so has a batch with fewer than two active prompts
    (Appendix D). With ``smoothing > 0`` every prompt is active. ``b_i`` uses ``r_i`` only through the choice of beta.

    Departures from the paper: `smoothing`, the common set of prompts, and rewards other than 0/1 (`ValueTable.tilt`).
    Values are clamped to ``[epsilon, 1 - epsilon]`` before they become weights.

    Metrics: ``beta``; ``active``, the share of rollouts with an active prompt; ``fallback``, the share of scored
    rollouts with ``b = 0`` because there is none; ``calibration_loss``, the minimum; ``reward_from_0.25`` and the like,
    the mean reward of prompts that the reference solves in a quarter to a half of its rollouts.

    Args:
        values: the table, its folder, or its Hub id.
        weighting: ``unb`` (best linear unbiased), ``vop`` (shrunk towards 0), ``rvg`` (mean of ratios), or ``none``:
            the initial value at the calibrated beta, as in the paper's Figure 2.
        smoothing: pseudo-rollouts at each end of the reward range, >= 0: 0.5 is Jeffreys' prior, 0 the paper.
        epsilon: activity threshold, in (0, 0.5).
        calibration: ``common`` minimises ``mean_i (r_i - b_i)^2`` (Eq. 6) over the same prompts for every beta;
            ``likelihood`` the cross-entropy of ``r_i`` under ``V_i``, over these prompts too; ``literal``, only to
            compare with, Eq. 6 over the prompts that are active at each beta, where small betas win that drop all but
            the hardest; ``none`` keeps ``beta = infinity``, with ``weighting="none"`` the baseline of PVPO
            (arXiv:2508.21104).
        target: see `BasisHistory`; b is then a function of the refined value.
        accept_mismatch: use the table although it was built for another model, template, reward or sampling.
        ev_gate: see `BasisHistory`.

    Raises:
        ValueError: a parameter out of its range, or a table that cannot be read.
    """

    values: ValueTable | str | Path
    weighting: Weighting = "unb"
    smoothing: NotNegative = 0.5
    epsilon: Epsilon = 1e-6
    calibration: Calibration = "common"
    target: Target = "value"
    accept_mismatch: bool = False
    ev_gate: bool = False
    uses_own_reward = True
    kept = ("curve", "optimal.moments", "gate.variances")
    ON_MISSING: ClassVar[dict[str, str]] = {
        "values": "the folder of a value table, which `basis-rl values RECIPE` builds. `basis_history` learns the "
        "values during training and needs no table."
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.values = self.table = ValueTable.of(self.values)
        self.uses_own_reward = self.calibration != "none"
        self.betas = beta_grid()
        # (K,) cross-entropy of the rewards so far, older ones count less.
        self.curve = torch.zeros_like(self.betas)

    def validate(self, run: RunContext) -> None:
        self.table.check(run, accept_mismatch=self.accept_mismatch)

    @property
    def reward_range(self) -> tuple[float, float]:
        return self.table.reward_range

    def believed(self, prompt_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Mean and variance of the value of each prompt, in reward units. ``(P,), (P,)`` float64.

        The table's value under a beta (Eq. 5), and the variance that n reference rollouts leave in it, to first order:
        ``(dV/dV_ref)^2 var_ref / (n + 2 smoothing + 1)``, with ``dV/dV_ref = var_beta / var_ref``. The beta is the one
        whose values explain the rewards of the last batches best (least cross-entropy, each batch counting 0.9 of the
        next), not Eq. 6's: that one is chosen for the refined baseline, which explains the rewards of a batch even
        where the values all lie above them. Before the first batch, the reference policy's.
        """
        low, high = self.reward_range
        tilt = self.table.tilt(prompt_ids, self.smoothing)
        # Before the first update the curve is 0 everywhere, and its minimum would be the least beta.
        beta = self.betas[int(self.curve.argmin())] if bool(self.curve.any()) else torch.inf
        values, variances = tilt(torch.tensor([beta, torch.inf], dtype=torch.float64))
        count = self.table.counts(prompt_ids) + 2 * self.smoothing + 1
        # The delta method: the slope of V in V_ref is var_beta / var_ref.
        spread = torch.where(variances[1] > 0, variances[0] ** 2 / (variances[1] * count), 0.0)
        return low + (high - low) * values[0], (high - low) ** 2 * spread

    def update(self, batch: RolloutBatch) -> None:
        candidates, _ = self._candidates(batch)
        if self.optimal.is_on or self.gate.is_on:
            low, high = self.reward_range
            value, _, served, *_ = self._refined(candidates)
            # Of the others, with b = 0, wrong rollouts have no gradient: only right ones would be learnt from.
            rewards = torch.where(served, batch.rewards, torch.nan)
            value = low + (high - low) * value
            self.optimal.learn(value, rewards, batch, (low, high))
            self.gate.learn(value, rewards, ~rewards.isnan())
        # Older batches fade, because the policy that they came from has changed.
        self.curve = _FORGETTING * self.curve + candidates.over_grid(candidates.cross_entropy)

    def _candidates(self, batch: RolloutBatch) -> tuple[_Candidates, Tensor]:
        """The batch under any beta, and the reference policy's values ``(N,)``."""
        low, high = self.reward_range
        rewards = (batch.rewards.double() - low) / (high - low)
        tilt = self.table.tilt(batch.prompt_ids, self.smoothing)
        reference = tilt(torch.tensor([torch.inf], dtype=torch.float64))[0][0]
        return _Candidates(self, tilt, rewards, self._inside(reference)), reference

    def advantages(self, batch: RolloutBatch) -> Advantages:
        low, high = self.reward_range
        candidates, reference = self._candidates(batch)
        value, active, served, beta, loss = self._refined(candidates)
        if self.gate.is_open:
            baseline, told = self.optimal(low + (high - low) * value, batch.action_mask, self.reward_range)
            baseline = torch.where(served.reshape(-1, *[1] * (baseline.ndim - 1)), baseline, 0.0)
        else:
            baseline, told = self.optimal(mean_of_others(batch), batch.action_mask, None)
        scorable = scorable_rows(batch)
        values = where_scorable(batch, less_baseline(batch.rewards, baseline))
        metrics = {
            **told,
            **self.gate.metrics(),
            # With calibration none beta is infinite, which a log cannot hold.
            "beta": min(beta, float(self.betas[-1])),
            "active": float(active.double().mean()),
            "fallback": float((scorable & ~served).sum() / scorable.sum().clamp(min=1)),
        }
        if math.isfinite(loss):
            metrics["calibration_loss"] = loss
        # Mean reward by quarters of the reference's value shows on which prompts the policy has learnt.
        quarters = [f"reward_from_{min(3, int(4 * p)) / 4:.2f}" for p in reference.tolist()]
        metrics.update(mean_by(quarters, batch.rewards))
        return Advantages(values=values, baseline=baseline, metrics=metrics)

    def _refined(self, candidates: _Candidates) -> tuple[Tensor, Tensor, Tensor, float, float]:
        """The refined values ``(N,)``, which of them are active, which serve as a baseline; beta and its loss."""
        beta, loss = self._calibrate(candidates)
        refined, active = candidates.refine(beta[None])
        sources = active[0] & ~candidates.rewards.isnan()
        # Without another rollout to learn from, only the table's own value is a baseline (App. D).
        served = active[0] & ((sources.sum() - sources.long() > 0) | (self.weighting == "none"))
        return refined[0], active[0], served, float(beta), loss

    def _inside(self, values: Tensor) -> Tensor:
        return (values > self.epsilon) & (values < 1 - self.epsilon)

    def _calibrate(self, candidates: _Candidates) -> tuple[Tensor, float]:
        """The best beta of the grid and its loss; the largest one where nothing can be learnt from the batch."""
        if self.calibration == "none":
            return torch.tensor(torch.inf, dtype=torch.float64), float(candidates.loss(torch.tensor([torch.inf]))[0])
        curve = candidates.over_grid(candidates.loss)
        if not bool(curve.isfinite().any()):
            return self.betas[-1], float("nan")
        # A batch without a single success ties all betas: then the one nearest to the reference policy is reported.
        best = int((curve <= curve.min()).nonzero()[-1])
        return self.betas[best], float(curve[best])


@dataclass(frozen=True)
class _Candidates:
    """One batch, seen under candidate betas. Rewards ``(N,)`` and values on the scale where the range is (0, 1)."""

    basis: Basis
    tilt: Callable[[Tensor], tuple[Tensor, Tensor]]
    rewards: Tensor
    common: Tensor

    def over_grid(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """``(K,)`` a loss of each beta of the grid, computed block by block."""
        block = max(1, _BLOCK // max(1, len(self.rewards)))
        return torch.cat([loss(betas) for betas in self.basis.betas.split(block)])

    def refine(self, betas: Tensor) -> tuple[Tensor, Tensor]:
        """Refined baselines, and who is active, each ``(K, N)``."""
        values, variances = self.tilt(betas)
        literal = self.basis.calibration == "literal"
        active = self.basis._inside(values) if literal else self.common.expand_as(values)
        # Weights divide by values and variances, which are 0 for prompts that are always wrong or always right.
        epsilon = self.basis.epsilon
        values = values.clamp(epsilon, 1 - epsilon)
        variances = variances.clamp(min=epsilon * (1 - epsilon))
        return refine(values, variances, self.rewards, active, self.basis.weighting), active

    def loss(self, betas: Tensor) -> Tensor:
        """``(K,)`` what calibration minimises; infinity where fewer than two active rollouts have a reward."""
        if self.basis.calibration == "likelihood":
            scored = self.common & ~self.rewards.isnan()
            losses = self.cross_entropy(betas)
        else:
            refined, active = self.refine(betas)
            scored = active & ~self.rewards.isnan()
            losses = mean_squared_error(refined, self.rewards, scored)
        return torch.where(scored.sum(dim=-1) > 1, losses, torch.inf)

    def cross_entropy(self, betas: Tensor) -> Tensor:
        """``(K,)`` mean cross-entropy of the rewards under the values, over the common set; 0 where none is scored."""
        values = self.tilt(betas)[0].clamp(self.basis.epsilon, 1 - self.basis.epsilon)
        scored = self.common & ~self.rewards.isnan()
        losses = cross_entropy(values, self.rewards.clamp(0.0, 1.0), scored)
        # Without a scored rollout the batch says nothing about beta, so it must not change the curve.
        return torch.where(losses.isinf(), 0.0, losses)
