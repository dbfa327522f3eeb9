"""Plots and tables of runs."""

from basis_rl.report.curves import plot_training, read_log

__all__ = ["plot_training", "read_log"]
