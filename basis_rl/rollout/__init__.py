"""Rollouts: where completions come from."""

from basis_rl.rollout.sampler import sample

__all__ = ["sample"]
