"""Returns, and advantages, targets and loss of a learned value (GAE: Schulman et al. 2016; PPO: the same 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from basis_rl.functional.energy import align, unalign


def at_turn_ends(turn_rewards: Sequence[Sequence[float]], action_mask: Tensor) -> Tensor:
    """``rho``: the k-th number of a rollout at the last token of its k-th turn, 0 elsewhere. ``(N, T)`` float32.

    Args:
        turn_rewards: N lists. Turns without a number have 0; numbers beyond the last turn belong to the last one.
        action_mask: ``(N, T)`` bool; a turn is a run of action tokens.
    """
    placed = torch.zeros(action_mask.shape, dtype=torch.float32)
    mask = action_mask.cpu()
    is_last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    for row, numbers in enumerate(turn_rewards):
        ends = is_last[row].nonzero().flatten().tolist()
        for turn, number in enumerate(numbers if ends else ()):
            placed[row, ends[min(turn, len(ends) - 1)]] += number
    return placed.to(action_mask.device)


def reward_to_go(rewards: Tensor, kl: Tensor | None, action_mask: Tensor, turn_rewards: Tensor | None = None) -> Tensor:
    """``G_t = r - sum_{j < t} rho_j - sum_{j >= t} KL_j`` over action tokens (gamma = 1).

    What turns before t have earned is no return of t; all other reward is at the end.

    Args:
        rewards: ``(N,)`` r, NaN = not scored.
        kl: ``(N, T)``, coefficient included, or None.
        action_mask: ``(N, T)`` bool; a penalty or reward outside of it does not count.
        turn_rewards: ``(N, T)`` rho, the part of r that belongs to turns (`at_turn_ends`), or None.

    Returns:
        ``(N, T)`` float64: the same number at every token with neither of them; NaN in rows without a reward.
    """
    total = rewards.double()[:, None].expand(action_mask.shape)
    if turn_rewards is not None:
        earned = torch.where(action_mask, turn_rewards.double(), 0.0)
        total = total - (earned.cumsum(dim=1) - earned)
    if kl is None:
        return total
    penalty = torch.where(action_mask, kl.double(), 0.0)
    return total - penalty.flip(1).cumsum(dim=1).flip(1)


def gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    kl: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    *,
    gamma: float,
    lam: float | Tensor,
) -> Tensor:
    """Generalised advantage estimates, arXiv:1506.02438, Eq. 16, over the action tokens a = 0 .. A-1 of a rollout::

        delta_a = rho_a - KL_a + [a = A-1] (r - sum_b rho_b) + gamma V_{a+1} - V_a        with V_A = 0
        A_a = delta_a + gamma lam A_{a+1} = sum_{l = 0 .. A-1-a} (gamma lam)^l delta_{a+l}

    ``rho_a`` is the reward of the turn that ends with action a, 0 elsewhere; without rewards of turns the whole r is at
    the end. ``V_a`` is the value of the state before action a. Columns outside the mask (padding, tool output) are
    passed over as if they were not there: the action after tool output is the next one. A rollout that was cut off at
    the length limit ends there like any other, with the reward that it was given. For ``gamma = lam = 1`` the sum
    telescopes to ``A_a = G_a - V_a``, `reward_to_go` less the value.

    Args:
        rewards: ``(N,)``, NaN = not scored.
        values: ``(N, T)``.
        action_mask: ``(N, T)`` bool.
        kl: ``(N, T)``, coefficient included, or None.
        turn_rewards: ``(N, T)`` rho, or None.
        gamma: discount of an action, in [0, 1].
        lam: in [0, 1], one number or ``(N,)``; 1 is the return less the value, 0 the one-step error alone.

    Returns:
        ``(N, T)`` float64; 0 outside the mask and in rows without a reward.
    """
    scored = ~rewards.isnan()
    mask = action_mask & scored[:, None]
    value = align(values.double(), mask)
    alive = align(mask.double(), mask)
    count = mask.sum(dim=1)
    reward = torch.zeros_like(value) if turn_rewards is None else align(turn_rewards.double(), mask)
    ends = (count > 0).nonzero().flatten()
    # What is no turn's belongs to the last action.
    reward[ends, count[ends] - 1] += (rewards.double() - reward.sum(dim=1))[ends]
    if kl is not None:
        reward = reward - align(kl.double(), mask)
    # V_A = 0: nothing comes after the last action.
    after = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    delta = (reward + gamma * after - value) * alive
    advantage = torch.zeros_like(delta)
    running = torch.zeros_like(delta[:, 0])
    # A_a = delta_a + gamma lam A_{a+1}, from the end.
    for a in reversed(range(delta.shape[1])):
        running = delta[:, a] + gamma * lam * running
        advantage[:, a] = running
    return unalign(advantage, mask)


def length_adaptive_lam(alpha: float, action_mask: Tensor) -> Tensor:
    """``lam_i = max(1 - 1 / (alpha l_i), 0)``, arXiv:2504.05118: the longer a rollout, the nearer to 1.

    So the estimate sums over about ``alpha l`` actions, whatever the length.

    Args:
        alpha: > 0.
        action_mask: ``(N, T)`` bool; ``l_i`` counts a row's actions, at least 1.

    Returns:
        ``(N,)`` float64 in [0, 1).
    """
    lengths = action_mask.sum(dim=1).clamp(min=1).double()
    return (1.0 - 1.0 / (alpha * lengths)).clamp(min=0.0)


def clipped_value_loss(predicted: Tensor, old: Tensor, targets: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """``max((V - R)^2, (V_clip - R)^2) / 2``, ``V_clip = V_old + clamp(V - V_old, -c, c)``, as in PPO2. Elementwise.

    The maximum takes the gradient away from a value that has moved by more than c towards its target, and from no
    other.

    Args:
        predicted: V, with gradient.
        old: V of the module that advantages were estimated with.
        targets: R.
        clip: c > 0 in reward units; None does not clip.

    Returns:
        The loss; and 1.0 where the clipped term is the larger one, else 0.0.
    """
    plain = (predicted - targets) ** 2
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain)
    clipped = (old + (predicted - old).clamp(-clip, clip) - targets) ** 2
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).to(plain.dtype).detach()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """``1 - Var(R - V) / Var(R)`` over the entries of the mask: 1 is perfect, 0 no better than a constant.

    None where the returns do not vary (or there are none), and it is not defined.
    """
    found = returns.double()[mask]
    predicted = values.double()[mask]
    if found.numel() < 2:
        return None
    spread = float(found.var(correction=0))
    return None if spread < 1e-12 else 1.0 - float((found - predicted).var(correction=0)) / spread
