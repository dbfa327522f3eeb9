"""Rollouts: where completions come from."""

from basis_rl.rollout.sampler import Completion, sample

__all__ = ["Completion", "sample"]
