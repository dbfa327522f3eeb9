"""POISE: a probe on the policy's own hidden states predicts what a prompt is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, less_baseline, mean_of_others, returns, where_scorable
from basis_rl.functional.regression import ridge_predictions
from basis_rl.functional.segments import leave_one_out_mean
from basis_rl.registry import Bounds, OneOrMore
from basis_rl.types import Advantages, RolloutBatch

# Entropy statistics of a rollout, and the number of tokens that its end has.
_STATISTICS = 3
_END = 10
Penalty = Annotated[float, Bounds("above 0 and finite", lambda x: 0 < x < math.inf)]


@dataclass(eq=False)
class Poise(Baseline):
    """``A_i = r_i - mean_{j != i} g(phi_j)`` over the other rollouts j of the prompt (arXiv:2605.07579, Eqs. 12, 13).

    The probe g is a ridge regression on ``phi_j = [h_j; h'_j; u_j]``, ``(2 H + 3,)``: the policy's hidden states at the
    prompt's end and at the completion's end (`RolloutBatch.hidden_states`), and the mean and deviation of the entropies
    of its tokens and their mean at its end. After each batch it learns ``phi_j -> mean_{i != j} r_i``, the reward of
    the others, from the last `memory` rollouts. So ``b_i`` depends neither on the own reward nor on the own completion.

    A rollout without another one of its prompt (``num_generations: 1``) has the value of a probe on ``h_i`` alone,
    which has learnt ``h_j -> r_j``. Predictions are kept within the remembered targets. Before the first batch b is
    the mean of the batch's other rollouts.

    Departures: the layer is the one after the middle (the paper's 19 is that of Qwen3-4B); one token of the prompt
    instead of ten; no split of a completion into reasoning and answer; entropies of the whole, their deviation and the
    end instead of the whole, reasoning and answer; prompt, completion and entropies count alike in the penalty, where
    the paper (Table 4) has 0.01 of standardised features and the authors' code 100 after a PCA; more than two
    rollouts, and one, by the rules above.

    Metrics: ``crossed``, the share of rollouts whose value is from others; ``remembered``, rollouts in the memory.

    Args:
        memory: rollouts that the probes are fitted to, >= 1. The features are kept in checkpoints: 4,096 of them are
            84 MB at H = 2,560.
        penalty: of the ridge regression, > 0 (`ridge_predictions`).

    Raises:
        ValueError: a parameter out of its range.
    """

    memory: OneOrMore = 4096
    penalty: Penalty = 3.0
    requires = frozenset({"hidden_states", "entropies"})
    reads_kl = True
    kept = ("seen", "crossed", "own")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of the last rollouts: features (M, 2 H + 3), mean return of the others and own return, NaN if there is none.
        # A tensor without a width can be joined with rows of any.
        self.seen = torch.zeros(0)
        self.crossed = torch.zeros(0, dtype=torch.float64)
        self.own = torch.zeros(0, dtype=torch.float64)

    def _predicted(self, features: Tensor, targets: Tensor, widths: Sequence[int]) -> Tensor:
        """``(N,)`` by a probe on the first features; NaN before it has learnt."""
        known = ~targets.isnan()
        if not bool(known.any()):
            return torch.full((len(features),), torch.nan, dtype=torch.float64)
        rows, asked = (x[:, : sum(widths)] for x in (self.seen[known], features))
        found = ridge_predictions(rows, targets[known], asked, widths, self.penalty)
        return found.clamp(targets[known].min(), targets[known].max())

    def advantages(self, batch: RolloutBatch) -> Advantages:
        features, has_tokens = _features(batch)
        width = (features.shape[1] - _STATISTICS) // 2
        predicted = self._predicted(features, self.crossed, [width, width, _STATISTICS])
        baseline = leave_one_out_mean(torch.where(has_tokens, predicted, torch.nan), batch.group_ids)
        alone = baseline.isnan()
        if bool(alone.any()):
            baseline = torch.where(alone, self._predicted(features, self.own, [width]), baseline)
        baseline = torch.where(baseline.isnan(), mean_of_others(batch), baseline)
        values = where_scorable(batch, less_baseline(returns(batch), baseline))
        metrics = {"crossed": float((~alone).double().mean()), "remembered": float(len(self.seen))}
        return Advantages(values=values, baseline=baseline, metrics=metrics)

    def update(self, batch: RolloutBatch) -> None:
        features, has_tokens = _features(batch)
        own = returns(batch)
        crossed = leave_one_out_mean(own, batch.group_ids)
        self.seen = torch.cat([self.seen, features[has_tokens]])[-self.memory :]
        self.crossed = torch.cat([self.crossed, crossed[has_tokens]])[-self.memory :]
        self.own = torch.cat([self.own, own[has_tokens]])[-self.memory :]


def _features(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """``phi``, ``(N, 2 H + 3)`` float32, and which rows have tokens to tell something of, ``(N,)``."""
    assert batch.hidden_states is not None
    assert batch.entropies is not None
    mask = batch.action_mask
    entropies = torch.where(mask, batch.entropies, 0.0)
    count = mask.sum(dim=1).clamp(min=1)
    mean = entropies.sum(dim=1) / count
    squares = torch.where(mask, (entropies - mean[:, None]) ** 2, 0.0).sum(dim=1)
    # Actions from each token on, itself included.
    to_come = mask.flip(1).cumsum(dim=1).flip(1)
    end = torch.where(to_come <= _END, entropies, 0.0).sum(dim=1) / count.clamp(max=_END)
    statistics = torch.stack([mean, (squares / count).sqrt(), end], dim=1)
    return torch.cat([batch.hidden_states.flatten(1), statistics], dim=1), mask.any(dim=1)
