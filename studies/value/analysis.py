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
from basis_rl.types import RolloutBatch


@dataclass(frozen=True)
class Estimator:
    """A baseline, and how many `rollouts` per prompt of a batch it sees."""

    name: str
    baseline: Baseline
    rollouts: int


def draw_batch(rng: np.random.Generator, pool: int, size: int) -> np.ndarray:
    """``(B,)`` distinct rows of the pool, each as likely as any other."""
    return rng.choice(pool, size=size, replace=False, p=np.full(pool, 1 / pool))


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


def explained_variance(baselines: np.ndarray, rewards: np.ndarray) -> float:
    """``1 - Var(r - b) / Var(r)`` over ``(B, G)`` rollouts, as a run logs it; NaN if the rewards do not vary."""
    found = gae.explained_variance(
        torch.from_numpy(baselines), torch.from_numpy(rewards), torch.ones(rewards.shape, dtype=torch.bool)
    )
    return float("nan") if found is None else found


def measure(
    estimators: Sequence[Estimator],
    prompt_ids: Sequence[str],
    truth: np.ndarray,
    samples: np.ndarray,
    *,
    size: int,
    batches: int,
    seed: int,
) -> dict[str, dict[str, float]]:
    """Of each estimator the mean ``mse`` over random batches, its standard ``error``, and the mean ``explained``.

    ``explained`` is `explained_variance`; batches in which the rewards do not vary are left out of it.
    """
    rng = np.random.default_rng(seed)
    most = max(estimator.rollouts for estimator in estimators)
    errors: dict[str, list[float]] = {estimator.name: [] for estimator in estimators}
    explained: dict[str, list[float]] = {estimator.name: [] for estimator in estimators}
    for _ in range(batches):
        rows = draw_batch(rng, len(truth), size)
        rewards, ids = draw_rewards(rng, samples, rows, most), [prompt_ids[row] for row in rows]
        for estimator in estimators:
            baselines = estimate(estimator, ids, rewards)
            errors[estimator.name].append(float(squared_errors(baselines, truth[rows]).mean()))
            explained[estimator.name].append(explained_variance(baselines, rewards[:, : estimator.rollouts]))
    return {
        name: {
            "mse": float(np.mean(found)),
            "error": float(np.std(found, ddof=1) / len(found) ** 0.5) if len(found) > 1 else float("nan"),
            "explained": mean_of_known(explained[name]),
        }
        for name, found in errors.items()
    }


def mean_of_known(numbers: Sequence[float]) -> float:
    """The mean of the numbers that are not NaN; NaN if there are none."""
    known = [number for number in numbers if number == number]
    return float(np.mean(known)) if known else float("nan")


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
