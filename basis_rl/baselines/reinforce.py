"""REINFORCE++: normalisation over the global batch (Hu et al. 2025, arXiv:2501.03262)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, TokenLevel, scorable_rows
from basis_rl.functional.returns import reward_to_go
from basis_rl.functional.segments import group_mean, segment_count
from basis_rl.registry import check_choice
from basis_rl.types import Advantages, RolloutBatch

Over = Literal["samples", "tokens"]


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

    uses_own_reward: bool = True
    reads_kl: bool = True
    scales: bool = True
    token_level: TokenLevel = "with_kl"

    def __init__(
        self, over: Over = "samples", eps: float = 1e-8, reward_clip: tuple[float, float] | None = None
    ) -> None:
        check_choice(type(self).__name__, "over", over, Over)
        if not eps > 0:
            raise ValueError(f"{type(self).__name__}: eps must be positive, got {eps}: equal returns have std 0.")
        if reward_clip is not None and not (len(reward_clip) == 2 and reward_clip[0] < reward_clip[1]):
            raise ValueError(f"{type(self).__name__}: reward_clip must be (low, high), low < high, got {reward_clip}.")
        self.over = over
        self.eps = eps
        self.reward_clip = reward_clip

    def reshape(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """``(N,)`` what is subtracted from the reward before normalisation; NaN where it is undefined."""
        return torch.zeros_like(rewards)

    def advantages(self, batch: RolloutBatch) -> Advantages:
        mask = batch.action_mask.cpu()
        rewards = batch.rewards.double().cpu()
        if self.reward_clip is not None:
            rewards = rewards.clamp(*self.reward_clip)
        local = self.reshape(rewards, batch.group_ids.cpu())
        rows = scorable_rows(batch) & ~local.isnan()
        shifted = torch.where(rows, rewards - local, torch.nan)
        returns = reward_to_go(shifted, None if batch.kl is None else batch.kl.cpu(), mask)
        mean, std = self._moments(torch.nan_to_num(returns), mask & rows[:, None])
        values = torch.where(mask & rows[:, None], (torch.nan_to_num(returns) - mean) / (std + self.eps), 0.0)
        baseline = torch.nan_to_num(local) + mean
        if batch.kl is None:
            values = torch.where(rows, (torch.nan_to_num(shifted) - mean) / (std + self.eps), 0.0)
        metrics = {"batch_mean": float(mean), "batch_std": float(std)}
        return Advantages(values=values, baseline=baseline, metrics=metrics)

    def _moments(self, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.over == "samples":
            lengths = mask.sum(dim=1)
            samples = (returns * mask).sum(dim=1)[lengths > 0] / lengths[lengths > 0]
        else:
            samples = returns[mask]
        if samples.numel() == 0:
            return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
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
