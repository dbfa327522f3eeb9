"""Token baselines: energy (logit gradient, length) x accumulation (cumulative, isolated, total) x tail.

All are points of one design (Optimal Token Baseline, Li et al. 2026): a weighted mean of the returns of the group's
rollouts that are still alive at action t, by default weighted with the energy that each has gathered up to t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline
from basis_rl.functional.energy import Accumulation, Tail, accumulate, align, unalign, weighted_baseline
from basis_rl.functional.gae import reward_to_go
from basis_rl.registry import Positive
from basis_rl.types import Advantages, RolloutBatch

Form = Literal["sequence", "token"]


class EnergyBaseline(Baseline):
    """``A_t = G_t - B_t``, ``B_t = sum_i G_t^i W_t^i / sum_i W_t^i`` over the rollouts of the group alive at action t.

    ``G_t`` is the reward-to-go (the reward itself, without KL in the reward and without rewards of turns). Rows without
    a reward take no part. No scaling. The own rollout is in the mean, as in the paper. That makes the bias larger than
    a group mean's: a rare action has a high energy, and pulls its baseline towards its own return.

    Metric: ``tail``, the share of action tokens (of rollouts, if values are per rollout) at which the rollout
    was the only one of its group.

    Args:
        tail: where one rollout of a group outlives the others, Eq. 8 gives ``B_t = G_t``, and its tail learns nothing
            (``zero``). ``last`` keeps the last baseline that was shared: less bias, more variance; nearly even
            (`studies.otb_tail`), better where long answers are rewarded. ``return`` sets ``B_t = 0``, as verl does
            since 2026-01-08 by default for ``tir_optimal_token_baseline`` (``handle_zero_tail``).
        max_rollout_weight: c. Off-policy, each token's energy is weighted by the squared truncated ratio,
            ``W_t = sum_{j <= t} min(c, rho_j)^2 w_j`` (App. D; Eq. 58 has the index t inside the sum, Eq. 60's j is
            right). rho is what the loss multiplies the token by: the rollout's ratio with TRL's ``sequence_*``, the
            token's with ``token_*``, 0 where it is masked. A group whose weights are all 0 has its plain mean.

    Raises:
        ValueError: a parameter out of its range.
    """

    min_group_size: int = 2
    uses_own_reward: bool = True
    reads_kl: bool = True
    accumulation: Accumulation = "cumulative"
    length_energy: ClassVar[bool] = False
    tail: Tail = "zero"
    max_rollout_weight: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.token_level = "never" if self.accumulation == "total" else "always"
        needs = set() if self.length_energy else {"energies"}
        needs |= {"rollout_weights"} if self.max_rollout_weight is not None else set()
        # Baselines of whole rollouts need only the sum.
        self.requires = frozenset(needs | (set() if self.accumulation == "total" else {"turn_rewards"}))

    def _energies(self, batch: RolloutBatch) -> Tensor:
        """``(N, T)`` float64: energy of each action, 0 elsewhere."""
        mask = batch.action_mask
        if self.length_energy:
            return mask.double()
        assert batch.energies is not None
        energies = batch.energies.double() * mask
        if self.max_rollout_weight is not None:
            assert batch.rollout_weights is not None
            energies = energies * batch.rollout_weights.double().clamp(max=self.max_rollout_weight) ** 2
        return energies

    def advantages(self, batch: RolloutBatch) -> Advantages:
        mask = batch.action_mask
        scored = ~batch.rewards.isnan()
        returns = reward_to_go(batch.rewards, batch.kl, mask, batch.turn_rewards)
        returns = align(torch.nan_to_num(returns), mask)
        alive = align(mask.double(), mask).bool() & scored[:, None]
        weights = accumulate(align(self._energies(batch), mask), self.accumulation)
        # One value per rollout, from the whole return.
        if self.accumulation == "total":
            returns = returns[:, :1]
            alive = alive[:, :1]
            weights = weights[:, :1]
        baseline, single_survivor = weighted_baseline(returns, weights, alive, batch.group_ids, self.tail)
        values = torch.where(alive, returns - baseline, 0.0)
        metrics = {"tail": float(single_survivor.sum() / alive.sum().clamp(min=1))}
        if self.accumulation == "total":
            return Advantages(values=values[:, 0], baseline=baseline[:, 0], metrics=metrics)
        return Advantages(values=unalign(values, mask), baseline=unalign(baseline, mask), metrics=metrics)


@dataclass(eq=False)
class OptimalTokenBaseline(EnergyBaseline):
    """OTB: the energy gathered up to t as the weight, Eq. 8."""

    tail: Tail = "zero"
    max_rollout_weight: Positive | None = None


class IsolatedEnergy(OptimalTokenBaseline):
    """The energy of token t alone as the weight, Eq. 52 (App. C.7)."""

    accumulation = "isolated"


@dataclass(eq=False)
class OptimalGlobalBaseline(EnergyBaseline):
    """OGB: ``b = sum_i R^i W^i / sum_i W^i``, W the total energy, R the whole return; one value per rollout, Eq. 21."""

    max_rollout_weight: Positive | None = None
    accumulation = "total"


@dataclass(eq=False)
class Opo(EnergyBaseline):
    """OPO (Hao et al. 2025, arXiv:2505.23585): the length in place of the energy.

    ``form="sequence"``: ``b = sum_i l_i r_i / sum_i l_i``. ``form="token"``: the length so far, which is the same for
    all rollouts alive at t, so that the baseline is their plain mean (OTB paper, Sec. 6.4).

    Raises:
        ValueError: unknown `form` or `tail`.
    """

    form: Form = "sequence"
    tail: Tail = "zero"
    length_energy = True

    def __post_init__(self) -> None:
        self.accumulation = "total" if self.form == "sequence" else "cumulative"
        super().__post_init__()
