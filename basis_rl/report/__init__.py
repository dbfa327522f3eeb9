"""Plots, tables and comparison of runs."""

from basis_rl.report.compare import compare_runs
from basis_rl.report.curves import plot_training, read_log
from basis_rl.report.page import write_report

__all__ = ["compare_runs", "plot_training", "read_log", "write_report"]
