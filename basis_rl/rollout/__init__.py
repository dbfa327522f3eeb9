"""Rollouts: where completions come from."""

from basis_rl.rollout.sampler import Completion, Sampling, prompt_tokens, sample

__all__ = ["Completion", "Sampling", "prompt_tokens", "sample"]
