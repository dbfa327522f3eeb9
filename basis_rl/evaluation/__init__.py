"""Measuring models."""

from basis_rl.evaluation.accuracy import accuracy

__all__ = ["accuracy"]
