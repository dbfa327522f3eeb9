"""Verifiable rewards."""

from basis_rl.rewards.extract import last_boxed
from basis_rl.rewards.math_verify import MathVerifyReward, gold_answer

__all__ = ["MathVerifyReward", "gold_answer", "last_boxed"]
