"""ReMax: the reward of the greedy rollout as the baseline."""

from __future__ import annotations

import torch

from basis_rl.baselines.base import Baseline, returns, scorable_rows, where_scorable
from basis_rl.types import Advantages, RolloutBatch


class ReMax(Baseline):
    """``A_i = r_i - r_greedy``, the reward of the prompt's greedy rollout (Li et al. 2023, arXiv:2310.10505). G >= 1.

    One greedy rollout a distinct prompt is generated and scored beside the sampled ones; none of it is trained on. A
    row whose greedy rollout could not be scored gets ``A = 0``; the share of such rows among the scored ones is the
    metric ``undefined``. Metric ``greedy``: mean reward of the greedy rollouts. With KL in the reward, ``r_i`` is the
    return, less the KL of all its tokens; the greedy rollout's own KL is not subtracted, which shifts b and not the
    expected gradient.
    """

    requires = frozenset({"greedy_rewards"})
    reads_kl: bool = True

    def advantages(self, batch: RolloutBatch) -> Advantages:
        assert batch.greedy_rewards is not None
        greedy = batch.greedy_rewards.double().cpu()
        scorable = scorable_rows(batch)
        undefined = scorable & greedy.isnan()
        metrics = {"undefined": float(undefined.sum() / scorable.sum().clamp(min=1))}
        if not bool(greedy.isnan().all()):
            metrics["greedy"] = float(greedy.nanmean())
        values = where_scorable(batch, returns(batch) - greedy)
        return Advantages(values=values, baseline=torch.nan_to_num(greedy, nan=0.0), metrics=metrics)
