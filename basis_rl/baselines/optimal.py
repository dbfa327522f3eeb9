"""The baseline of least variance as a function of a prompt's value, learnt from the rollouts of the run."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from basis_rl.baselines.base import Baseline
from basis_rl.baselines.gate import VarianceGate
from basis_rl.functional.energy import align, unalign, weighted_moments, weighted_regression
from basis_rl.types import RolloutBatch

Target = Literal["value", "optimal", "optimal_token"]
Ends = tuple[float, float]
UNIT: Ends = (0.0, 1.0)
# Each batch counts 0.97 of the next one: how the energies of right and wrong rollouts compare moves slowly.
_FORGETTING = 0.97
# How many rollouts of mean energy the prior is worth.
_PRIOR = 4.0
# A rollout counts for at most so many times the mean energy of the batch's others: a token that should never have been
# sampled can have ten thousand times that, and a step clips it too.
_MOST = 10.0
# The least distance of b from the ends of the reward range: a rollout whose advantage is 0 has no gradient, and so
# nothing to learn its energy from.
_MARGIN = 0.01


class OptimalBaseline:
    """``b = c_0 + c_1 V + c_2 V^2``: what a belief in the value V aims at for the least variance of the gradient.

    The power of a rollout's gradient, ``E[(r - b)^2 |S|^2]`` with its score S, is least at ``b* = E[r |S|^2] /
    E[|S|^2]`` (OTB, Eq. 21), a mean of rewards weighted by energy. It is V only if right and wrong rollouts have scores
    of one size. For all prompts with value V it is estimated from the rollouts of earlier batches, each batch counting
    0.97 of the next one; so the own reward is excluded exactly::

        c = argmin sum_j W_j (r_j - c . x_j)^2 + rho |c - (0, 1, 0)|^2       x = (1, V, V^2), rewards scaled to [0, 1]

    ``W_j`` is the sum of the rollout's `RolloutBatch.gradient_energies`. Departure from OTB, whose energy is that of
    the logits (Eq. 7): a token that could be many others has a large one there and hardly moves the weights. What the
    loss does to a rollout (``1 / |o|``, clipping, importance weights) is in the gradient already; so are a KL or
    entropy term of the loss, which blur it, and not what divides advantages or weighs them.

    ``optimal_token`` has a c for each action t: OTB's isolated energy (Eq. 52) of all rollouts with a t-th action, the
    belief in the place of the group. So a single rollout has a baseline for each of its tokens. Where rollouts are few,
    c is drawn to that of whole ones. Without a belief (``degree=0``), b is the best constant.

    Metrics: ``at_0``, ``at_0.5``, ``at_1``: b of prompts with these values, on the scale from 0 to 1 (``degree=0``:
    ``constant``); ``learnt_from``, the rollouts behind it; ``power_value`` and ``power_none``: `powers`.

    Args:
        target: ``optimal`` or ``optimal_token``, or ``value``, with which nothing is learnt.
        degree: of the polynomial.
    """

    def __init__(self, target: Target, degree: int = 2) -> None:
        self.target = target
        self.degree = degree
        # (1 + A, d + 2, d + 2): sums of W z z' over rollouts, z = (1, V, ..., V^d, r); first of whole rollouts, then of
        # those with an a-th action.
        self.moments = torch.zeros((1, degree + 2, degree + 2), dtype=torch.float64)

    @property
    def is_on(self) -> bool:
        return self.target != "value"

    def _features(self, values: Tensor) -> Tensor:
        return values[:, None] ** torch.arange(self.degree + 1, dtype=torch.float64)

    def _coefficients(self, prior: Tensor) -> Tensor:
        """``(1 + A, d + 1)``; `prior` is the c before the first rollout."""
        whole = weighted_regression(self.moments[:1], prior, _PRIOR)
        return torch.cat([whole, weighted_regression(self.moments[1:], whole, _PRIOR)])

    def __call__(self, values: Tensor, mask: Tensor, ends: Ends | None = UNIT) -> tuple[Tensor, dict[str, float]]:
        """The baseline of each rollout, or of each of its tokens, from the state before the batch.

        Args:
            values: ``(N,)`` V, in reward units (with ``degree=0``: what b is before the first rollout).
            mask: ``(N, T)`` bool, the actions.
            ends: range of the rewards; None until it is known. Until then, and before the first rollout, b is V.

        Returns:
            ``(N,)``, or with ``optimal_token`` ``(N, T)``, in reward units; and the metrics. With ``value`` what was
            given, and none.
        """
        learnt_from = float(self.moments[0, 0, 0])
        if not self.is_on or ends is None or (not learnt_from and self.degree):
            return (values[:, None] * mask if self.target == "optimal_token" else values), {}
        low, high = ends
        if self.degree == 0:
            c = self._coefficients(values[:1])
            found = c.T.expand(len(values), -1)
            metrics = {"constant": float(c[0])}
        else:
            c = self._coefficients(torch.eye(self.degree + 1, dtype=torch.float64)[1])
            found = (self._features((values - low) / (high - low)) @ c.T).clamp(_MARGIN, 1 - _MARGIN)
            shown = self._features(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)) @ c[0]
            metrics = dict(zip(("at_0", "at_0.5", "at_1"), shown.clamp(_MARGIN, 1 - _MARGIN).tolist(), strict=True))
        metrics |= {"learnt_from": learnt_from, **self.powers(c[0], ends)}
        found = low + (high - low) * found
        if self.target == "optimal":
            return found[:, 0], metrics
        # An action later than any before has the c of whole rollouts.
        later = found[:, :1].expand(-1, max(1, mask.shape[1] - (len(c) - 1)))
        return unalign(torch.cat([found[:, 1:], later], dim=1), mask), metrics

    def powers(self, c: Tensor, ends: Ends) -> dict[str, float]:
        """``E[W (r - b)^2]`` over the rollouts so far with V and with 0 as b, as shares of that with b = c . x.

        Nothing where c . x explains all rewards, as where all are equal. Without a belief there is no V.
        """
        zero = torch.zeros_like(c)
        zero[0] = -ends[0] / (ends[1] - ends[0])
        others = {"none": zero} | ({"value": torch.eye(len(c), dtype=c.dtype)[1]} if self.degree else {})

        def power(b: Tensor) -> float:
            z = torch.cat([-b, torch.ones(1, dtype=b.dtype)])
            return float(z @ self.moments[0] @ z)

        least = power(c)
        if least <= 1e-9 * float(self.moments[0, 0, 0]):
            return {}
        return {f"power_{name}": power(b) / least for name, b in others.items()}

    def learn(self, values: Tensor, rewards: Tensor, batch: RolloutBatch, ends: Ends = UNIT) -> None:
        """Take in a batch.

        Args:
            values: ``(N,)`` as in `__call__`, told without the own reward.
            rewards: ``(N,)``; NaN is left out.
            batch: with gradient energies; without them, as what a sampler discarded, nothing is learnt.
            ends: range of the rewards.
        """
        if not self.is_on or batch.gradient_energies is None:
            return
        values, rewards = ((each.double() - ends[0]) / (ends[1] - ends[0]) for each in (values, rewards))
        if self.degree:
            rewards = rewards.clamp(0.0, 1.0)
        weights = align(batch.gradient_energies.double(), batch.action_mask)
        whole = weights.sum(dim=1, keepdim=True)
        known = ~rewards.isnan() & (whole[:, 0] > 0) & whole[:, 0].isfinite()
        if self.target == "optimal_token":
            whole = torch.cat([whole, weights], dim=1)
        if not bool(known.any()):
            return
        z = torch.cat([self._features(values[known]), rewards[known, None]], dim=1)
        weights = whole[known]
        own = weights[:, :1]
        others = (own.sum() - own) / max(1, len(own) - 1)
        weights = weights * (_MOST * others / own).clamp(max=1.0) if len(own) > 1 else weights
        # A batch counts by its rollouts, however large their energies are.
        new = weighted_moments(z, weights / weights[:, 0].mean())
        self.moments = pad_sequence([_FORGETTING * self.moments, new]).sum(dim=1)

    def rescale(self, offset: float, factor: float) -> None:
        """Move to a wider range of rewards, on which a value V is ``offset + factor V``, and a reward likewise."""
        powers = torch.zeros((self.degree + 2, self.degree + 2), dtype=torch.float64)
        row = torch.ones(1, dtype=torch.float64)
        for power in range(self.degree + 1):
            # (offset + factor V)^k in powers of V.
            powers[power, : power + 1] = row
            row = torch.nn.functional.pad(offset * row, (0, 1)) + torch.nn.functional.pad(factor * row, (1, 0))
        powers[-1, 0] = offset
        powers[-1, -1] = factor
        self.moments = powers @ self.moments @ powers.T


class TargetedBaseline(Baseline):
    """A baseline that may aim at the least variance of the gradient instead of the value that it estimates.

    Class attributes:
        target: of an `OptimalBaseline`; a parameter of subclasses.
        ev_gate: whether there is a `VarianceGate`; a parameter of those that have one.
        degree: of the `OptimalBaseline`.
    """

    target: Target = "value"
    ev_gate: bool = False
    degree: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = VarianceGate(self.ev_gate)
        self.optimal = OptimalBaseline(self.target, self.degree)
        self.learns_from = frozenset({"gradient_energies"} if self.optimal.is_on else ())
        self.token_level = "always" if self.target == "optimal_token" else "never"
