"""REINFORCE and its relatives: no baseline, one number of the whole batch, or the reward of the greedy rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, CenterScale, less_baseline, returns, scorable_rows, where_scorable
from basis_rl.baselines.optimal import Target, TargetedBaseline
from basis_rl.functional.gae import reward_to_go
from basis_rl.functional.segments import group_mean, segment_count
from basis_rl.registry import Bounds, Positive
from basis_rl.types import Advantages, RolloutBatch

Over = Literal["samples", "tokens"]
Ends = Annotated[tuple[float, float], Bounds("with the smaller one first", lambda ends: ends[0] < ends[1])]


class NoBaseline(CenterScale):
    """``A_i = r_i``: REINFORCE without a baseline, the "vanilla" rows of the BASIS paper."""

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return torch.zeros_like(rewards)


@dataclass(eq=False)
class BatchMean(CenterScale, TargetedBaseline):
    """``A_i = r_i - (1/N) sum_j r_j``, the mean over all scored rollouts of the batch, the own one included.

    The BASIS paper's "REINFORCE++" rows are this, without any division by a standard deviation (its Appendix A).

    Args:
        target: ``value``; ``optimal`` for the mean over the rollouts of earlier batches, weighted by energy, the
            constant of least variance (`OptimalBaseline`); ``optimal_token`` for one at each action. The batch's mean
            then counts as four rollouts of it.

    Raises:
        ValueError: unknown target.
    """

    target: Target = "value"
    uses_own_reward = True
    kept = ("optimal.moments",)
    degree = 0

    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_mean(rewards, torch.zeros_like(group_ids))

    def advantages(self, batch: RolloutBatch) -> Advantages:
        result = super().advantages(batch)
        if not self.optimal.is_on:
            return result
        baseline, told = self.optimal(result.baseline, batch.action_mask)
        values = where_scorable(batch, less_baseline(returns(batch), baseline))
        return Advantages(values=values, baseline=baseline, metrics={**result.metrics, **told})

    def update(self, batch: RolloutBatch) -> None:
        self.optimal.learn(batch.rewards.double(), returns(batch), batch)


@dataclass(eq=False)
class ReinforcePP(Baseline):
    """``A_t = (G_t - mean) / (std + eps)`` over the global batch, ``G_t = r - sum_{j >= t} KL_j`` (Eqs. 4, 5). G >= 1.

    ``over="samples"`` takes mean and std over rollouts, each with the mean of its own ``G_t``, so that a long answer
    counts as much as a short one; ``over="tokens"`` over all action tokens, as common implementations do. ddof = 0,
    ``eps = 1e-8``. Without KL in the reward ``G_t = r`` and there is one value per rollout.

    `reward_clip` = (low, high) clips each reward before anything else, KL not included: the option of common
    implementations (OpenRLHF clips to (-10, 10)).

    Departure: App. B.2 sets the advantage to 0 before the last token. That describes where the reward is put; with
    gamma = 1 the return is the same at every token (Eq. 4), which is what is done here.

    Metrics: ``batch_mean``, ``batch_std``.

    Raises:
        ValueError: a parameter out of its range.
    """

    over: Over = "samples"
    # Equal returns have a standard deviation of 0.
    eps: Positive = 1e-8
    reward_clip: Ends | None = None
    uses_own_reward = True
    reads_kl = True
    scales = True
    token_level = "with_kl"

    def reshape(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """``(N,)`` what is subtracted from the reward before normalisation; NaN where it is undefined."""
        return torch.zeros_like(rewards)

    def advantages(self, batch: RolloutBatch) -> Advantages:
        rewards = batch.rewards.double()
        if self.reward_clip is not None:
            rewards = rewards.clamp(*self.reward_clip)
        local = self.reshape(rewards, batch.group_ids)
        rows = scorable_rows(batch) & ~local.isnan()
        tokens = batch.action_mask & rows[:, None]
        shifted = torch.where(rows, rewards - local, 0.0)
        to_go = reward_to_go(shifted, batch.kl, tokens)
        mean, std = self._moments(to_go, tokens)
        # Without KL the return is the same at each token, and one number per rollout says it.
        values = torch.where(rows, shifted - mean, 0.0) if batch.kl is None else torch.where(tokens, to_go - mean, 0.0)
        metrics = {"batch_mean": float(mean), "batch_std": float(std)}
        baseline = torch.nan_to_num(local) + mean
        return Advantages(values=values / (std + self.eps), baseline=baseline, metrics=metrics)

    def _moments(self, to_go: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the returns over rollouts or tokens (`over`); 0 and 0 if there are none."""
        samples = to_go[tokens]
        if self.over == "samples":
            lengths = tokens.sum(dim=1)
            samples = (to_go * tokens).sum(dim=1)[lengths > 0] / lengths[lengths > 0]
        samples = samples if len(samples) else samples.new_zeros(1)
        return samples.mean(), samples.std(correction=0)


class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ with baseline: ``A' = r - mean of the prompt's rollouts`` (Eq. 6), then global mean and std (Eq. 7).

    A group with fewer than two scored rollouts gets ``A = 0`` and takes no part in mean and std. The paper adds a
    separate k2 loss towards the reference (Eq. 8), which is not the baseline's.
    """

    min_group_size: int = 2

    def reshape(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        enough = segment_count(rewards, group_ids) >= self.min_group_size
        return torch.where(enough, group_mean(rewards, group_ids), torch.nan)


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
        greedy = batch.greedy_rewards.double()
        scorable = scorable_rows(batch)
        undefined = scorable & greedy.isnan()
        metrics = {"undefined": float(undefined.sum() / scorable.sum().clamp(min=1))}
        if not bool(greedy.isnan().all()):
            metrics["greedy"] = float(greedy.nanmean())
        values = where_scorable(batch, returns(batch) - greedy)
        return Advantages(values=values, baseline=torch.nan_to_num(greedy, nan=0.0), metrics=metrics)
