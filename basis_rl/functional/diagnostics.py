"""What the trainer reports of any baseline, from the batch and the result alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from basis_rl.functional.gae import explained_variance
from basis_rl.types import Advantages, RolloutBatch


def advantage_metrics(batch: RolloutBatch, result: Advantages) -> dict[str, float]:
    """Scalars of one generation batch; averages run over the scored rollouts (and their action tokens).

    - ``baseline/mean``: mean of ``b``; ``baseline/mse_to_reward``: mean of ``(r - b)^2``, which is the variance of the
      reward plus the squared error of the baseline, so that of two baselines on one batch the lower one is nearer.
    - ``baseline/explained_variance``: ``1 - Var(r - b) / Var(r)``, at most 1. 0 is no better than one number for all
      rollouts: a value table that falls to it has aged. Too high for a baseline that contains its own reward, such as
      a group mean or BV-Blend. Left out where all rewards are equal. PPO reports that of its discounted return.
    - ``baseline/at_bounds``: share of rollouts whose baseline is exactly 0 or 1 (BASIS Fig. 3d).
    - ``advantages/zero``: share of rollouts that teach nothing, every advantage exactly 0; ``advantages/std``;
      ``advantages/max_abs``, the largest |A|: a baseline that divides by a small deviation shows here. The trainer
      passes the advantages that are trained with, those of a sampler with ``correct`` times their weights.
    - ``reward/unscored``: share of rollouts, of all, without a reward.
    """
    rewards = batch.rewards.double()
    mask = batch.action_mask
    scored = ~rewards.isnan()
    metrics = {"reward/unscored": float((~scored).double().mean())}
    if not bool((scored & mask.any(dim=1)).any()):
        return metrics
    n, t = mask.shape
    weights = (mask & scored[:, None]).double()
    if result.baseline.ndim == 1 and result.values.ndim == 1:
        weights = (weights.sum(dim=1, keepdim=True) > 0).double()
        t = 1
    baseline = result.baseline.double().cpu().reshape(n, -1).expand(n, t)
    values = result.values.double().cpu().reshape(n, -1).expand(n, t)
    total = weights.sum()

    def mean(x: Tensor) -> float:
        return float((x * weights).sum() / total)

    rows = weights.sum(dim=1) > 0
    center = mean(values)
    repeated = torch.nan_to_num(rewards)[:, None].expand(n, t)
    explained = explained_variance(baseline, repeated, weights > 0)
    if explained is not None:
        metrics["baseline/explained_variance"] = explained
    return {
        **metrics,
        "baseline/mean": mean(baseline),
        "baseline/mse_to_reward": mean((repeated - baseline) ** 2),
        "baseline/at_bounds": mean(((baseline == 0) | (baseline == 1)).double()),
        "advantages/zero": float(((values * weights) == 0).all(dim=1)[rows].double().mean()),
        "advantages/std": mean((values - center) ** 2) ** 0.5,
        "advantages/max_abs": float((values * weights).abs().max()),
    }


def mean_by(labels: Sequence[str], rewards: Tensor) -> dict[str, float]:
    """Mean reward of the rows with each label, in the order of the labels; those without a scored row are left out.

    Args:
        labels: N.
        rewards: ``(N,)``, NaN = not scored.
    """
    rows: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    means = {label: float(rewards[rows[label]].double().nanmean()) for label in sorted(rows)}
    return {label: mean for label, mean in means.items() if mean == mean}
