"""What the value study computes from rewards, without a model: batches, baselines, errors. All arrays are numpy arrays.

The pool has ``P`` prompts and a batch ``B``; there are ``G`` rollouts per prompt, and ``R`` stored for the estimators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from basis_rl.baselines import Baseline
from basis_rl.functional import gae
from basis_rl.functional.blue import Weighting, refine
from basis_rl.functional.tilt import beta_grid
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable

BANDS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Estimator:
    """A baseline, and how many `rollouts` per prompt of a batch it sees."""

    name: str
    baseline: Baseline
    rollouts: int


def tilt_to(values: np.ndarray, spread: float) -> np.ndarray:
    """``(P,)`` sampling weights ``w_i = exp(-k (V_i - mean)^2) / Z`` that give V the standard deviation `spread`.

    ``k > 0`` prefers prompts of medium value and ``k < 0`` the extremes, down to the k below which the weight gathers
    on the single most distant prompt. k is found by bisection; if no k gives this spread, the closest one is used.
    """

    def weights(k: float) -> np.ndarray:
        logits = -k * (values - values.mean()) ** 2
        w = np.exp(logits - logits.max())
        return w / w.sum()

    def spread_at(k: float) -> float:
        w = weights(k)
        return float(np.sqrt(w @ (values - w @ values) ** 2))

    low, high = max(np.linspace(-40.0, 0.0, 161).tolist(), key=spread_at), 200.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spread_at(middle) > spread else (low, middle)
    return weights((low + high) / 2)


def draw_batch(rng: np.random.Generator, weights: np.ndarray, size: int) -> np.ndarray:
    """``(B,)`` distinct rows of the pool."""
    return rng.choice(len(weights), size=size, replace=False, p=weights)


def draw_rewards(rng: np.random.Generator, samples: np.ndarray, rows: np.ndarray, rollouts: int) -> np.ndarray:
    """``(B, rollouts)`` rewards out of ``(P, R)``, drawn without replacement within each prompt."""
    columns = rng.permuted(np.tile(np.arange(samples.shape[1]), (len(rows), 1)), axis=1)[:, :rollouts]
    return samples[rows[:, None], columns]


def rollout_batch(prompt_ids: Sequence[str], rewards: np.ndarray, step: int = 0) -> RolloutBatch:
    """Rewards ``(B, G)`` as the batch that a trainer would make of them; the rows of a group are adjacent."""
    prompts, group = rewards.shape
    return RolloutBatch(
        rewards=torch.from_numpy(rewards.reshape(-1)).float(),
        group_ids=torch.arange(prompts).repeat_interleave(group),
        prompt_ids=[prompt_id for prompt_id in prompt_ids for _ in range(group)],
        action_mask=torch.ones((prompts * group, 1), dtype=torch.bool),
        step=step,
    )


def estimate(estimator: Estimator, prompt_ids: Sequence[str], rewards: np.ndarray) -> np.ndarray:
    """``(B, G)`` baselines from the first G of the ``(B, >= G)`` rewards, so that the comparison is paired (App. A)."""
    seen = np.ascontiguousarray(rewards[:, : estimator.rollouts])
    result = estimator.baseline.advantages(rollout_batch(prompt_ids, seen))
    return result.baseline.double().numpy().reshape(seen.shape)


def squared_errors(baselines: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """``(B,)``: ``mean_g (b_ig - V_i)^2``."""
    return ((baselines - truth[:, None]) ** 2).mean(axis=1)


def at_bounds(baselines: np.ndarray) -> np.ndarray:
    """``(B,)``: the share of each prompt's baselines that are exactly 0 or 1."""
    return ((baselines == 0) | (baselines == 1)).mean(axis=1)


def explained_variance(baselines: np.ndarray, rewards: np.ndarray) -> float:
    """``1 - Var(r - b) / Var(r)`` over ``(B, G)`` rollouts, as a run logs it; NaN if the rewards do not vary."""
    found = gae.explained_variance(
        torch.from_numpy(baselines), torch.from_numpy(rewards), torch.ones(rewards.shape, dtype=torch.bool)
    )
    return float("nan") if found is None else found


def by_band(numbers: np.ndarray, truth: np.ndarray, edges: Sequence[float] = BANDS) -> list[float]:
    """Mean of `numbers` over the prompts in each band of V; the last band is closed. NaN for a band without prompts."""
    band = np.clip(np.digitize(truth, edges) - 1, 0, len(edges) - 2)
    return [float(numbers[band == k].mean()) if (band == k).any() else float("nan") for k in range(len(edges) - 1)]


def nanmean_rows(rows: Sequence[Sequence[float]]) -> list[float]:
    """Column means without NaN: each row is a mean within a batch, so these are means over batches (App. A)."""
    table = np.array(rows, dtype=float)
    known = ~np.isnan(table)
    sums = np.where(known, table, 0.0).sum(axis=0)
    return [float(s / n) if n else float("nan") for s, n in zip(sums, known.sum(axis=0), strict=True)]


def measure(
    estimators: Sequence[Estimator],
    prompt_ids: Sequence[str],
    truth: np.ndarray,
    samples: np.ndarray,
    weights: np.ndarray,
    *,
    size: int,
    repeats: int,
    seed: int,
) -> dict[str, object]:
    """Draw `repeats` batches: the spread of V in each, and each estimator's MSE and shares by batch and by band."""
    rng = np.random.default_rng(seed)
    most = max(estimator.rollouts for estimator in estimators)
    spreads: list[float] = []
    found: dict[str, dict[str, list]] = {
        e.name: {"mse": [], "at_bounds": [], "explained": [], "mse_by_band": [], "at_bounds_by_band": []}
        for e in estimators
    }
    for _ in range(repeats):
        rows = draw_batch(rng, weights, size)
        rewards, values = draw_rewards(rng, samples, rows, most), truth[rows]
        ids = [prompt_ids[row] for row in rows]
        spreads.append(float(values.std()))
        for estimator in estimators:
            baselines = estimate(estimator, ids, rewards)
            errors, bounds = squared_errors(baselines, values), at_bounds(baselines)
            into = found[estimator.name]
            into["mse"].append(float(errors.mean()))
            into["at_bounds"].append(float(bounds.mean()))
            into["explained"].append(explained_variance(baselines, rewards[:, : estimator.rollouts]))
            into["mse_by_band"].append(by_band(errors, values))
            into["at_bounds_by_band"].append(by_band(bounds, values))
    for into in found.values():
        for key in ("mse_by_band", "at_bounds_by_band"):
            into[key] = nanmean_rows(into[key])
    return {"spread": spreads, "estimators": found}


def bin_means(x: Sequence[float], y: Sequence[float], edges: Sequence[float]) -> list[float]:
    """Mean of y over the pairs whose x lies in each bin ``[edge, next)``; NaN for an empty bin."""
    where, values = np.digitize(x, edges) - 1, np.asarray(y, dtype=float)
    return [float(values[where == k].mean()) if (where == k).any() else float("nan") for k in range(len(edges) - 1)]


def beta_curves(
    table: ValueTable, prompt_ids: Sequence[str], rewards: np.ndarray, truth: np.ndarray, smoothing: float,
    weighting: Weighting = "unb", epsilon: float = 1e-6,
) -> dict[str, np.ndarray]:  # fmt: skip
    """MSE of one batch at each beta of the grid, ``(K,)``: ``initial`` with ``V_beta``, ``refined`` with Eq. 7.

    As in `Basis` with its calibration ``common``, a prompt is active depending on its reference value alone, and values
    are clamped, so that at the smallest betas the refined estimator is the mean of the other rewards of the batch.

    `rewards`: ``(B,)``, one per prompt.
    """
    tilt = table.tilt(prompt_ids, smoothing)
    reference, _ = tilt(torch.tensor([torch.inf], dtype=torch.float64))
    active = (reference[0] > epsilon) & (reference[0] < 1 - epsilon)
    values, variances = tilt(beta_grid())
    clamped = values.clamp(epsilon, 1 - epsilon)
    refined = refine(
        clamped, variances.clamp(min=epsilon * (1 - epsilon)), torch.from_numpy(rewards).double(), active, weighting
    )
    target = torch.from_numpy(truth)
    return {
        "initial": ((values - target) ** 2).mean(dim=1).numpy(),
        "refined": ((refined - target) ** 2).mean(dim=1).numpy(),
    }


def drift(before: np.ndarray, now: np.ndarray) -> dict[str, float]:
    """How prompts have moved since the reference, in logits of smoothed success rates; rewards ``(P, n)``, ``(P, m)``.

    ``shift`` is the mean movement, the common tilt ``1 / beta``. ``spread`` is the standard deviation of the prompts'
    movements around it, without the part that comes from sampling both rates. ``correlation`` is the correlation of V
    before and now.
    """
    logits, noise = [], 0.0
    for rewards in (before, now):
        count = rewards.shape[1] + 1.0
        p = (rewards.sum(axis=1) + 0.5) / count
        logits.append(np.log(p / (1 - p)))
        noise += float((1 / (count * p * (1 - p))).mean())
    moved = logits[1] - logits[0]
    return {
        "shift": float(moved.mean()),
        "spread": float(max(0.0, moved.var() - noise) ** 0.5),
        "correlation": float(np.corrcoef(before.mean(axis=1), now.mean(axis=1))[0, 1]),
    }


def replay(baseline: Baseline, history: Sequence[tuple[Sequence[str], np.ndarray]]) -> Baseline:
    """`baseline` after it has learnt from earlier batches: for each, the ids of B prompts and rewards ``(B, G)``."""
    for step, (prompt_ids, rewards) in enumerate(history):
        baseline.update(rollout_batch(prompt_ids, rewards, step))
    return baseline
