"""Environments that the model acts in by calling their tools."""
