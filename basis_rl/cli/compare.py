"""``basis-rl compare RUN...``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from basis_rl.cli.main import report
from basis_rl.report.compare import Comparison, compare_runs
from basis_rl.report.page import headline, write_report
from basis_rl.report.tables import Table, tables

USAGE = """The runs at one number of rollouts: learning curves, final table, differences. Runs that differ in the seed
alone become one line with its spread."""


def main(argv: Sequence[str]) -> int:
    """Read the runs, print the tables and write the report."""
    parser = argparse.ArgumentParser(prog="basis-rl compare", description=USAGE)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run, or a folder that holds runs")
    parser.add_argument("--budget", type=float, help="rollouts; default: as many as every run has sampled")
    parser.add_argument("--reference", metavar="NAME", help="setting to compare with; default: the first")
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder of the report; default: report")
    options = parser.parse_args(argv)
    try:
        found = compare_runs(options.runs, budget=options.budget, reference=options.reference)
        page = write_report(found, options.output)
    except (ValueError, OSError) as error:
        return report(error)
    print(describe(found))
    print(f"Report: {page} (one file, opens offline) and {options.output / 'report.md'}")
    return 0


def describe(comparison: Comparison) -> str:
    """The tables as plain text."""
    return "\n\n".join(
        [headline(comparison), *comparison.notes, *(f"{t.title}\n{_plain(t)}" for t in tables(comparison))]
    )


def _plain(table: Table) -> str:
    rows = [table.columns, *(row.cells for row in table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
