"""How the trainer gets its rollouts: vLLM or transformers, ahead of time, greedy, in several turns with tools."""
