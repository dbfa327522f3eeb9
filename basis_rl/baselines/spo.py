"""SPO: one rollout per prompt against a tracker of each prompt's success rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import less_baseline, mean_of_others, scorable_rows, where_scorable
from basis_rl.baselines.optimal import Target
from basis_rl.baselines.reward_range import RangedBelief
from basis_rl.registry import PositiveShare
from basis_rl.types import Advantages, RolloutBatch
from basis_rl.values.table import ValueTable

# The middle of the paper's interval [0.875, 0.96] of rho.
_MIDDLE = 0.92


@dataclass(eq=False)
class Spo(RangedBelief):
    """``A_i = (r_i - v_i - mean) / (std + eps)`` over the batch, ``v = alpha / (alpha + beta)`` (arXiv:2509.13232).

    Each prompt has a Beta tracker of its success rate (Single-stream Policy Optimization, Xu and Ding 2025). After the
    policy update, those that were seen forget and learn::

        alpha <- rho alpha + sum r     beta <- rho beta + sum (1 - r)     over the prompt's rollouts of the batch

    A prompt of the table starts at ``alpha = N0 v_0``, ``beta = N0 (1 - v_0)`` with ``N0 = 1 / (1 - 0.875) = 8`` and
    ``v_0 = (sum r + 0.5) / (n + 1)``; others at ``alpha = beta = 0.5``, as in the authors' code. Mean and standard
    deviation (ddof = 1, ``eps = 1e-8``) are those of ``r - v`` over the scored rollouts. Rewards are scaled to [0, 1]
    by their range (`RewardRange`); a tracker whose range widens keeps its value in reward units.

    Metrics: ``tracked``, the mean v; ``known``, the share of rollouts whose prompt has a tracker of its own.

    Args:
        values: a table, its folder or Hub id, or None.
        forgetting: rho in (0, 1], or ``"kl"``: ``rho = 2^(-D / 0.06)`` within [0.875, 0.96], where D says how far the
            policy has moved on the prompt since it was last seen. Departure: the authors score each prompt's last
            rollout again under today's policy. Here D is ``|mean_t log pi_now(y_t) - mean_t log pi_then(y'_t)|`` over
            the prompt's rollouts of now and of then, which needs no further pass, but makes rho rather too small.
        normalize: whether to subtract the mean and divide by the deviation; without it ``A = r - v``, whose own reward
            is excluded.
        target: see `BasisHistory`. With another than ``value``, `normalize` only divides, by the root mean square of
            ``r - b``: the mean would move b away from its target, and without it ``r - b`` may be far from 0 where its
            deviation is not.
        accept_mismatch: see `Basis`.
        fixed_range, ev_gate: see `BasisHistory`.

    Raises:
        ValueError: a parameter out of its range, or a table that cannot be read.
    """

    values: ValueTable | str | Path | None = None
    forgetting: PositiveShare | Literal["kl"] = _MIDDLE
    normalize: bool = True
    target: Target = "value"
    accept_mismatch: bool = False
    fixed_range: Sequence[float] | None = None
    ev_gate: bool = False
    kept = ("trackers", "range.ends", "optimal.moments", "gate.variances")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requires = frozenset({"log_probs"} if self.forgetting == "kl" else ())
        # The batch's mean and deviation contain the own reward.
        self.uses_own_reward = self.scales = self.normalize
        # Per prompt alpha, beta, and the mean log-probability of its last rollouts in this run (NaN before any).
        self.trackers: dict[str, tuple[float, float, float]] = {}
        if self.table is not None:
            for name, v in zip(self.table.prompt_ids, self.tabled(self.table, 0.5).tolist(), strict=True):
                self.trackers[name] = (8.0 * v, 8.0 * (1 - v), float("nan"))

    def _tracked(self, prompt_ids: Sequence[str]) -> Tensor:
        """``(N, 2)`` float64: alpha and beta."""
        rows = [self.trackers.get(name, (0.5, 0.5))[:2] for name in prompt_ids]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)

    def believed(self, prompt_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Mean and variance of the value of each prompt, those of its Beta, in reward units. ``(P,), (P,)`` float64."""
        alpha, beta = self._tracked(prompt_ids).T
        total = alpha + beta
        low, high = self.reward_range
        mean = alpha / total
        return self.range.unscaled(mean), (high - low) ** 2 * mean * (1 - mean) / (total + 1)

    def advantages(self, batch: RolloutBatch) -> Advantages:
        rewards = batch.rewards.double()
        scorable = scorable_rows(batch)
        believes = self.range.known and self.gate.is_open
        tracked = self.believed(batch.prompt_ids)[0] if believes else mean_of_others(batch)
        away = (rewards - tracked)[scorable]
        # Of one rollout there is no deviation.
        normalize = self.normalize and len(away) > 1
        baseline = tracked
        told: dict[str, float] = {}
        if self.optimal.is_on:
            baseline, told = self.optimal(tracked, batch.action_mask, self.range.known_ends if believes else None)
        elif normalize:
            # The mean is a part of the baseline: the advantage is (r - baseline) / scale.
            baseline = tracked + away.mean()
        values = where_scorable(batch, less_baseline(batch.rewards, baseline))
        if normalize:
            counts = scorable if values.ndim == 1 else scorable[:, None] & batch.action_mask
            scale = values[counts].square().mean().sqrt() if self.optimal.is_on else away.std()
            values = values / (scale + 1e-8)
        known = [name in self.trackers for name in batch.prompt_ids]
        metrics = {"tracked": float(tracked.mean()), "known": sum(known) / max(1, len(known)), **told}
        metrics |= self.range.metrics() | self.gate.metrics()
        return Advantages(values=values, baseline=baseline, metrics=metrics)

    def update(self, batch: RolloutBatch) -> None:
        if widened := self.range.widen(batch.rewards):
            self._rescale(*widened)
        if not self.range.known:
            return
        rewards = self.range.scaled(batch.rewards)
        value = self.believed(batch.prompt_ids)[0]
        self.optimal.learn(value, batch.rewards, batch, self.reward_range)
        self.gate.learn(value, batch.rewards, ~batch.rewards.isnan())
        rows: dict[str, list[int]] = {}
        # Not only scorable rows: the reward of a rollout whose tokens are masked (`mask_truncated_completions`) counts.
        for row in (~batch.rewards.isnan()).nonzero().flatten().tolist():
            rows.setdefault(batch.prompt_ids[row], []).append(row)
        for name, own in rows.items():
            alpha, beta = self._tracked([name])[0].tolist()
            rho, log_prob = self._forgets(name, batch, own)
            total = float(rewards[own].sum())
            self.trackers[name] = (rho * alpha + total, rho * beta + len(own) - total, log_prob)

    def _rescale(self, offset: float, factor: float) -> None:
        """Move the trackers to a wider range, on which a value V is ``offset + factor V``."""
        self.optimal.rescale(offset, factor)
        for name, (alpha, beta, log_prob) in self.trackers.items():
            total = alpha + beta
            right = offset * total + factor * alpha
            self.trackers[name] = (right, total - right, log_prob)

    def _forgets(self, name: str, batch: RolloutBatch, rows: list[int]) -> tuple[float, float]:
        """rho, and the mean log-probability of the rollouts' tokens."""
        if not isinstance(self.forgetting, str):
            return self.forgetting, float("nan")
        then = self.trackers.get(name, (0.5, 0.5, float("nan")))[2]
        mask = batch.action_mask[rows]
        if batch.log_probs is None or not bool(mask.any()):
            # Log-probabilities are computed only for tokens that are trained on.
            return _MIDDLE, then
        now = float(batch.log_probs[rows].double()[mask].mean())
        distance = abs(now - then) if then == then else 0.0
        return min(0.96, max(0.875, 2.0 ** (-distance / 0.06))), now
