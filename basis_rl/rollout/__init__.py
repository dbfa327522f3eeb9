"""Rollouts: where completions come from."""

from basis_rl.rollout.client import ServersLost, sample_servers
from basis_rl.rollout.sampler import Completion, Sampling, end_tokens, prompt_tokens, sample

__all__ = ["Completion", "Sampling", "ServersLost", "end_tokens", "prompt_tokens", "sample", "sample_servers"]
