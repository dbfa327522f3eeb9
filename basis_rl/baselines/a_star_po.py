"""A*-PO: one rollout per prompt against the optimal value of its KL-regularised problem (Brantley et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from basis_rl.baselines.base import Baseline, returns, where_scorable
from basis_rl.registry import Positive
from basis_rl.types import Advantages, RolloutBatch, RunContext
from basis_rl.values.table import ValueTable


@dataclass(eq=False)
class AStarPO(Baseline):
    """``A_i = r_i - sum_t KL_t - V*_i``, with ``V* = beta1 log mean_k exp(r_k / beta1)`` (arXiv:2505.20686).

    The mean is over the prompt's reference rollouts in the table, and the advantage ``(N,)`` is that of whole rollouts.
    The authors minimise ``(beta2 log(pi / pi_ref) - (r - V*))^2``. On the policy's own rollouts its gradient is, up to
    the factor ``2 beta2``, that of REINFORCE with this advantage, where the KL is in the reward: set
    ``kl_placement: reward``, ``kl_estimator: k1``, and `beta` to the paper's ``beta2`` (0.001). Departures: the
    objective may clip; and prompts of which no reference rollout was right stay (``V*`` is then their reward of 0).

    Args:
        values: the table, its folder, or its Hub id.
        beta1: temperature of V*, > 0, in reward units: near 0 V* is the best reference reward, at infinity the mean.
        accept_mismatch: see `Basis`.

    Raises:
        ValueError: a parameter out of its range, or a table that cannot be read.
    """

    values: ValueTable | str | Path
    beta1: Positive = 0.5
    accept_mismatch: bool = False
    reads_kl = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.values = self.table = ValueTable.of(self.values)

    def validate(self, run: RunContext) -> None:
        self.table.check(run, accept_mismatch=self.accept_mismatch)

    def advantages(self, batch: RolloutBatch) -> Advantages:
        scaled = [torch.tensor(self.table.rewards(name), dtype=torch.float64) / self.beta1 for name in batch.prompt_ids]
        optimal = [self.beta1 * float(each.logsumexp(dim=0) - math.log(len(each))) for each in scaled]
        baseline = torch.tensor(optimal, dtype=torch.float64)
        return Advantages(values=where_scorable(batch, returns(batch) - baseline), baseline=baseline, metrics={})
