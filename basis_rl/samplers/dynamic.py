"""DAPO's dynamic sampling: groups whose rewards are all equal are drawn again."""

from __future__ import annotations

import torch
from torch import Tensor

from basis_rl.samplers.uniform import Uniform


class Dynamic(Uniform):
    """Uniform prompts; groups whose rewards are all equal are replaced by other prompts' (DAPO, 2503.14476, Eq. 11).

    A batch is trained on when every group has two different rewards, or after `max_refills` further draws: then the
    groups that are left have no variance, as without it. Every rollout that was drawn is counted in ``num_rollouts``.
    A group must have at least two rollouts.

    Departure: DAPO draws whole batches and keeps what is over for the next step; here only as many groups are drawn as
    are missing (on several ranks, on each as many as on the one that misses most).

    Args:
        max_refills: draws beyond the first one, >= 1.

    Raises:
        ValueError: `max_refills` is not a whole number >= 1.
    """

    in_dataset_order = False

    def __init__(self, max_refills: int = 4) -> None:
        if not isinstance(max_refills, int) or isinstance(max_refills, bool) or max_refills < 1:
            raise ValueError(
                f"dynamic needs a whole number max_refills >= 1, got {max_refills}; without refills take 'uniform'."
            )
        self.max_refills = max_refills

    def keeps(self, rewards: Tensor) -> Tensor:
        scored = ~rewards.isnan()
        least = torch.where(scored, rewards, torch.inf).amin(dim=1)
        largest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
        return largest > least
