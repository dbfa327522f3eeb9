"""Value tables: what the reference model earns on each prompt, sampled once."""

from basis_rl.values.table import ValueTable

__all__ = ["ValueTable"]
