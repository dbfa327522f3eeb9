"""BASIS with history: shares rewards across the prompts of a batch and across the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, check_state_keys, scorable_rows
from basis_rl.functional.history import (
    filter_update,
    leave_one_out_values,
    shift_grid,
    shift_log_likelihood,
    shift_posterior,
)
from basis_rl.types import Advantages, RolloutBatch, RunContext
from basis_rl.values.table import ValueTable

_STATE = ("prompt_ids", "mean", "variance", "last_seen", "shift_mean", "shift_variance", "step")
_UNKNOWN_SHIFT = 100.0


class BasisHistory(Baseline):
    """``A_i = r_i - V_i``, ``V_i`` from a belief about prompt i that every reward of the run has sharpened.

    A static table ages: prompts do not all move by the same tilt. Here each prompt has a belief ``N(m_i, v_i)`` about
    the logit of its value, from the table's counts or flat, and

    1. all prompts of a batch share one shift s in logits, integrated out over its posterior given the rewards of the
       OTHER rollouts and the shift of earlier batches: ``V_i = E[sigmoid(m_i + s) | r_j, j != i]``. The own reward is
       excluded exactly.
    2. After the policy update, the prompts that were seen are filtered (extended Kalman, observation variance
       ``V (1 - V)``), and uncertainty grows with the steps: ``v += drift`` a step for a prompt, ``shift_drift`` for s.

    What the BASIS paper's Limitations ask for, sharing across prompts and across steps; the tilt of its Eq. 5 is the
    shift ``1 / beta``. There is no `weighting` and no `calibration`: refining these values with the batch once more
    (Eq. 7) would let the own reward in through the others' values, and gains nothing. Works without a table too
    (``values=None``: every prompt starts at ``N(0, prior_variance)``).

    Metrics: ``shift``; ``beta = 1 / shift`` within the paper's grid [0.01, 5]; ``uncertainty``, the mean standard
    deviation of the beliefs, in logits; ``known``, the share of rollouts whose prompt has a belief of its own.

    Args:
        values: a table, its folder or Hub id, or None.
        smoothing: pseudo-rollouts at each end of the reward range, > 0, for the beliefs that the table gives.
        epsilon: values are kept in ``[epsilon, 1 - epsilon]``.
        accept_mismatch: see `Basis`.
        drift: variance that a prompt's logit gains a step, beside the common shift.
        shift_drift: variance that the common shift gains a step.
        prior_variance: of a prompt without a table.

    Raises:
        ValueError: a parameter out of its range, or a table that cannot be read.
    """

    def __init__(
        self,
        values: ValueTable | str | Path | None = None,
        smoothing: float = 0.5,
        epsilon: float = 1e-6,
        accept_mismatch: bool = False,
        drift: float = 0.003,
        shift_drift: float = 0.02,
        prior_variance: float = 4.0,
    ) -> None:
        if smoothing <= 0 or not 0 < epsilon < 0.5 or drift < 0 or shift_drift < 0 or prior_variance <= 0:
            raise ValueError(
                "basis_history: needs smoothing > 0, 0 < epsilon < 0.5, drift >= 0, shift_drift >= 0 and "
                f"prior_variance > 0, got {smoothing}, {epsilon}, {drift}, {shift_drift}, {prior_variance}."
            )
        self.values = values if isinstance(values, ValueTable) or values is None else ValueTable.load(values)
        self.epsilon, self.accept_mismatch = epsilon, accept_mismatch
        self.drift, self.shift_drift, self.prior_variance = drift, shift_drift, prior_variance
        self.reward_range = self.values.reward_range if self.values else (0.0, 1.0)
        self.shifts = shift_grid()
        self.shift_mean, self.shift_variance, self.step = 0.0, _UNKNOWN_SHIFT, 0
        self._set_prompts(self.values.prompt_ids if self.values else [])
        self.mean = torch.zeros(len(self._row), dtype=torch.float64)
        self.variance = torch.zeros_like(self.mean)
        if self.values is not None:
            p = self.values.tilt(self.values.prompt_ids, smoothing)(torch.tensor([torch.inf]))[0][0]
            rollouts = torch.tensor([float(len(self.values.rewards(i))) for i in self.values.prompt_ids]).double()
            self.mean = torch.logit(p)
            self.variance = 1.0 / ((rollouts + 2 * smoothing) * p * (1 - p))
        self.last_seen = torch.zeros(len(self._row), dtype=torch.float64)

    def _set_prompts(self, prompt_ids: list[str]) -> None:
        self._row = {prompt_id: row for row, prompt_id in enumerate(prompt_ids)}

    def validate(self, run: RunContext) -> None:
        if self.values is not None:
            self.values.check(run, accept_mismatch=self.accept_mismatch)

    def _belief(self, prompt_ids: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance now, and who has a belief of its own; each ``(N,)``. Others have the prior."""
        rows = torch.tensor([self._row.get(prompt_id, -1) for prompt_id in prompt_ids], dtype=torch.long)
        known = rows >= 0
        mean, variance = torch.zeros(len(rows), dtype=torch.float64), torch.full((len(rows),), self.prior_variance)
        variance = variance.double()
        mean[known] = self.mean[rows[known]]
        age = self.step - self.last_seen[rows[known]]
        variance[known] = self.variance[rows[known]] + self.drift * age
        return mean, variance, known

    def _scaled(self, batch: RolloutBatch) -> Tensor:
        low, high = self.reward_range
        return ((batch.rewards.double().cpu() - low) / (high - low)).clamp(0.0, 1.0)

    def _log_prior(self) -> Tensor:
        return -0.5 * (self.shifts - self.shift_mean) ** 2 / (self.shift_variance + self.shift_drift)

    def advantages(self, batch: RolloutBatch) -> Advantages:
        rewards = self._scaled(batch)
        mean, variance, known = self._belief(batch.prompt_ids)
        likelihood = shift_log_likelihood(mean, rewards, self.shifts)
        values = leave_one_out_values(mean, likelihood, self._log_prior(), self.shifts)
        values = values.clamp(self.epsilon, 1 - self.epsilon)
        shift, _ = shift_posterior(likelihood, self._log_prior(), self.shifts)
        low, high = self.reward_range
        baseline = low + (high - low) * values
        scorable = scorable_rows(batch)
        result = torch.where(scorable, torch.nan_to_num(batch.rewards.double().cpu() - baseline, nan=0.0), 0.0)
        metrics = {
            "shift": float(shift),
            "beta": min(5.0, 1.0 / max(float(shift), 0.2)),
            "uncertainty": float(variance.sqrt().mean()),
            "known": float(known.double().mean()),
        }
        return Advantages(values=result, baseline=baseline, metrics=metrics)

    def update(self, batch: RolloutBatch) -> None:
        rewards = self._scaled(batch)
        mean, variance, _ = self._belief(batch.prompt_ids)
        likelihood = shift_log_likelihood(mean, rewards, self.shifts)
        shift, uncertainty = shift_posterior(likelihood, self._log_prior(), self.shifts)
        values = torch.sigmoid(mean + shift)
        scored = ~rewards.isnan()
        prompts = list(dict.fromkeys(p for p, use in zip(batch.prompt_ids, scored.tolist(), strict=True) if use))
        position = {prompt_id: k for k, prompt_id in enumerate(prompts)}
        index = torch.tensor([position.get(prompt_id, 0) for prompt_id in batch.prompt_ids], dtype=torch.long)
        zeros = torch.zeros(len(prompts), dtype=torch.float64)
        if prompts:
            residual = zeros.index_add(0, index[scored], (rewards - values)[scored])
            information = zeros.index_add(0, index[scored], (values * (1 - values))[scored])
            before = zeros.index_copy(0, index[scored], mean[scored])
            spread = zeros.index_copy(0, index[scored], variance[scored])
            self._store(prompts, *filter_update(before, spread, residual, information))
            self.shift_mean, self.shift_variance = float(shift), float(uncertainty)
        else:
            self.shift_variance += self.shift_drift
        self.step += 1

    def _store(self, prompts: list[str], mean: Tensor, variance: Tensor) -> None:
        new = [prompt_id for prompt_id in prompts if prompt_id not in self._row]
        if new:
            self._set_prompts([*self._row, *new])
            more = torch.zeros(len(new), dtype=torch.float64)
            self.mean, self.variance = torch.cat([self.mean, more]), torch.cat([self.variance, more])
            self.last_seen = torch.cat([self.last_seen, more])
        rows = torch.tensor([self._row[prompt_id] for prompt_id in prompts], dtype=torch.long)
        self.mean[rows], self.variance[rows] = mean, variance
        self.last_seen[rows] = float(self.step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompt_ids": list(self._row),
            "mean": self.mean.clone(),
            "variance": self.variance.clone(),
            "last_seen": self.last_seen.clone(),
            "shift_mean": self.shift_mean,
            "shift_variance": self.shift_variance,
            "step": self.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys(self, state, _STATE)
        self._set_prompts(list(state["prompt_ids"]))
        self.mean, self.variance = state["mean"].clone(), state["variance"].clone()
        self.last_seen = state["last_seen"].clone()
        self.shift_mean, self.shift_variance = float(state["shift_mean"]), float(state["shift_variance"])
        self.step = int(state["step"])
