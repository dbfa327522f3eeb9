"""Verifiable rewards."""

from basis_rl.rewards.extract import last_boxed
from basis_rl.rewards.math_verify import MathVerifyReward

__all__ = ["MathVerifyReward", "last_boxed"]
