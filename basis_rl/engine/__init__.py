"""vLLM and transformers as engines: servers, their client, and where rollouts come from."""

from basis_rl.engine.client import ServersLost, sample_servers
from basis_rl.engine.local import Completion, Sampling, end_tokens, prompt_tokens, sample

__all__ = ["Completion", "Sampling", "ServersLost", "end_tokens", "prompt_tokens", "sample", "sample_servers"]
