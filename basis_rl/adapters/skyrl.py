"""Our baselines in SkyRL, by `register_advantage_estimator`.

SkyRL asks an estimator with ``index``, the ``uid`` of each row. Its dataset makes it of the row's number, so it is the
same in every epoch, and is the id of the prompt; a dataset of your own that returns another ``uid`` names the prompts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from basis_rl.adapters.base import Estimator
from basis_rl.baselines import Baseline


class SkyRLEstimator(Estimator):
    """What SkyRL calls with each batch; see `register`."""

    def __call__(
        self, token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[str], config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns, ``(N, T)`` each.

        Raises:
            ValueError: the reward has a KL penalty in it.
        """
        if getattr(config, "use_kl_in_reward", False):
            raise ValueError("trainer.algorithm.use_kl_in_reward: a baseline of ours takes none here; use use_kl_loss.")
        uids = list(map(str, index))
        rewards = token_level_rewards.sum(dim=-1)
        # SkyRL fills a batch up with copies of its first row, whose ``uid`` is pad0, pad1, ...
        padding = torch.tensor([bool(re.fullmatch(r"pad\d+", uid)) for uid in uids], device=rewards.device)
        advantages = self.estimate(rewards.masked_fill(padding, torch.nan), response_mask, uids, uids)
        return advantages, rewards[:, None] * response_mask


def register(name: str, baseline: Baseline | str, state_file: str | Path | None = None) -> SkyRLEstimator:
    """Make `baseline` known to SkyRL as ``trainer.algorithm.advantage_estimator=NAME``.

    Other processes get a copy through SkyRL's registry, so call it in the one that trains.

    Args:
        name: that SkyRL does not have yet.
        baseline: see `Estimator`.
        state_file: see `Estimator`; SkyRL's checkpoints have no place for it.

    Raises:
        ValueError: the baseline does not work in SkyRL, or SkyRL has that name.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator

    estimator = SkyRLEstimator(baseline, "SkyRL", state_file=state_file)
    register_advantage_estimator(name)(estimator)
    return estimator
