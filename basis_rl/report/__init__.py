"""Plots, tables and comparison of runs; the model card."""

from basis_rl.report.compare import compare_runs
from basis_rl.report.page import write_report
from basis_rl.report.plots import plot_training

__all__ = ["compare_runs", "plot_training", "write_report"]
