"""Energy-weighted baselines (Optimal Token Baseline, Li et al. 2026): who weighs how much at which action.

Everything here is aligned by ACTION token, not by column: column a of an ``(N, A)`` tensor is the a-th token that the
policy sampled, so that rollouts with tool output in different places still meet at the same action. A is the largest
number of actions of a rollout.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Accumulation = Literal["cumulative", "isolated", "total"]
Tail = Literal["zero", "last", "return"]


def logit_gradient_energy(log_probs: Tensor, sum_squared_probs: Tensor) -> Tensor:
    """``w_t = 1 - 2 pi(y_t) + sum_v pi(v)^2``: the squared norm of the log-probability's gradient in the logits, Eq. 7.

    In [0, 2]; 0 where the policy is certain. Any shape, elementwise.
    """
    return (1.0 - 2.0 * log_probs.exp() + sum_squared_probs).clamp(min=0.0)


def align(values: Tensor, action_mask: Tensor) -> Tensor:
    """``(N, T)`` by column -> ``(N, A)`` by action, 0 past a rollout's last action."""
    position = action_mask.long().cumsum(dim=1)
    width = max(1, int(position[:, -1].max())) if position.numel() else 1
    # The a-th action of a rollout goes to column a, wherever tool output has moved it.
    rows, columns = action_mask.nonzero(as_tuple=True)
    aligned = torch.zeros((values.shape[0], width), dtype=values.dtype, device=values.device)
    aligned[rows, position[rows, columns] - 1] = values[rows, columns]
    return aligned


def unalign(values: Tensor, action_mask: Tensor) -> Tensor:
    """``(N, A)`` by action -> ``(N, T)`` by column, 0 where the mask is 0. The inverse of `align` on the mask."""
    position = (action_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return torch.where(action_mask, values.gather(1, position), 0.0)


def accumulate(energies: Tensor, how: Accumulation) -> Tensor:
    """Weights from energies, each ``(N, A)``.

    ``cumulative``: ``W_t = sum_{j <= t} w_j``, the noise gathered since the start (OTB, Eq. 8); ``isolated``: ``w_t``
    (Eq. 52); ``total``: ``sum_j w_j`` at every t (OGB, Eq. 21).
    """
    if how == "cumulative":
        return energies.cumsum(dim=1)
    if how == "total":
        return energies.sum(dim=1, keepdim=True).expand_as(energies)
    return energies


def weighted_baseline(
    returns: Tensor, weights: Tensor, alive: Tensor, group_ids: Tensor, tail: Tail
) -> tuple[Tensor, Tensor]:
    """``B_t = sum_i G_t^i W_t^i / sum_i W_t^i`` over the rollouts i of the group that are alive at t, Eq. 8.

    Where all weights are 0 (every token certain), the plain mean. Where fewer than two rollouts are alive the equation
    gives ``B_t = G_t``: ``tail="zero"`` does that, and the advantage is 0; ``tail="last"`` keeps the last ``B_t`` that
    at least two rollouts shared; ``tail="return"`` sets ``B_t = 0``, and the advantage is the return. The last two only
    in groups where at least two rollouts have a first action.

    Args:
        returns: ``(N, A)`` float64, ``G_t``.
        weights: ``(N, A)`` float64, >= 0.
        alive: ``(N, A)`` bool: the rollout has an a-th action, and a reward.
        group_ids: ``(N,)``.
        tail: see above.

    Returns:
        ``(N, A)`` float64 baseline, 0 where no rollout of the group is alive; and ``(N, A)`` bool, where the tail rule
        was used.
    """
    groups, index = torch.unique(group_ids, return_inverse=True)
    shape = (groups.numel(), returns.shape[1])

    def total(x: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64).index_add_(0, index, torch.where(alive, x.double(), 0.0))

    count = total(torch.ones_like(returns))
    weight = total(weights)
    mean = total(returns) / count.clamp(min=1)
    # Eq. 8; with all weights 0 it would be 0 / 0.
    baseline = torch.where(weight > 0, total(weights * returns) / weight.clamp(min=1e-300), mean)
    lonely = count == 1
    if tail == "return":
        baseline = torch.where(lonely & (count[:, :1] > 1), 0.0, baseline)
    elif tail == "last":
        actions = torch.arange(shape[1])
        # The last action that at least two rollouts shared, for each action after it.
        last = torch.where(count > 1, actions, -1).cummax(dim=1).values
        shared = (last >= 0) & lonely
        baseline = torch.where(shared, baseline.gather(1, last.clamp(min=0)), baseline)
    return baseline[index], lonely[index] & alive


def weighted_moments(z: Tensor, weights: Tensor) -> Tensor:
    """``sum_j w_ja z_j z_j'`` for each a. ``(N, D), (N, A) -> (A, D, D)``."""
    return torch.einsum("na,ni,nj->aij", weights.to(z), z, z)


def weighted_regression(moments: Tensor, prior: Tensor, strength: float) -> Tensor:
    """``c = argmin_c sum_j w_j (r_j - c . x_j)^2 + strength |c - prior|^2``: ridge regression drawn to `prior`.

    Args:
        moments: ``(A, D, D)`` of `weighted_moments`, the last of the D entries being r, the others x.
        prior: ``(D - 1,)`` or ``(A, D - 1)``.
        strength: > 0.

    Returns:
        ``(A, D - 1)``.
    """
    eye = torch.eye(moments.shape[-1] - 1, dtype=moments.dtype)
    right = moments[:, :-1, -1] + strength * prior
    return torch.linalg.solve(moments[:, :-1, :-1] + strength * eye, right[:, :, None])[:, :, 0]
