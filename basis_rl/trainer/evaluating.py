"""Evaluation during training: avg@k and pass@k of each set, every problem counted once."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from basis_rl.functional.passk import pass_at_k


class EvalScores:
    """Rewards of one evaluation, by problem.

    TRL's ``eval_reward`` is the mean of the means of the batches, of which the last may be smaller and, on several
    ranks, filled up with problems from the start. Here each problem has its first `num_rollouts` rewards, no others.
    """

    def __init__(self) -> None:
        self.rewards: dict[str, list[float]] = {}

    def add(self, prompt_ids: Sequence[str], rewards: Tensor, num_rollouts: int) -> None:
        """Take in a batch of all ranks: ``(N,)`` names and rewards; NaN (not scored) counts 0, as a wrong answer."""
        for name, reward in zip(prompt_ids, rewards.tolist(), strict=True):
            of_problem = self.rewards.setdefault(name, [])
            if len(of_problem) < num_rollouts:
                of_problem.append(0.0 if math.isnan(reward) else reward)

    def take(self, num_rollouts: int) -> dict[str, float]:
        """Return ``avg@n``, the mean over problems, and ``pass@k`` for k = 2, 4, ... up to n, and reset the counts.

        ``pass@k`` is there where all rewards are 0 or 1, and every problem has n. Empty where nothing was added.
        """
        rewards, self.rewards = list(self.rewards.values()), {}
        if not rewards:
            return {}
        found = {f"avg@{num_rollouts}": sum(sum(each) / len(each) for each in rewards) / len(rewards)}
        graded = all(reward in (0.0, 1.0) for each in rewards for reward in each)
        if graded and all(len(each) == num_rollouts for each in rewards):
            right = torch.tensor([sum(each) for each in rewards])
            ks = {2**i for i in range(1, num_rollouts.bit_length())} | ({num_rollouts} - {1})
            for k in sorted(k for k in ks if k <= num_rollouts):
                found[f"pass@{k}"] = float(pass_at_k(num_rollouts, right, k).mean())
        return found


def of_set(metrics: dict[str, Any], name: str) -> dict[str, Any]:
    """The metrics of one of several evaluation sets under its name; TRL logs those of all under the same."""
    return {f"{name}_{key}": value for key, value in metrics.items()} if name else dict(metrics)


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """After it every generator of random numbers is where it was before."""
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
