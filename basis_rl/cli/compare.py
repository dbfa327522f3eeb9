"""``basis-rl compare RUN...``."""

from __future__ import annotations

from collections.abc import Sequence

from basis_rl.cli.options import compare_parser
from basis_rl.report.compare import Comparison, compare_runs
from basis_rl.report.page import headline, write_report
from basis_rl.report.tables import tables
from basis_rl.report.verdict import verdict
from basis_rl.text import aligned


def main(argv: Sequence[str]) -> int:
    """Read the runs, print the tables and write the report."""
    options = compare_parser().parse_args(argv)
    found = compare_runs(options.runs, reference=options.reference)
    page = write_report(found, options.output_dir)
    print(as_text(found))
    print(f"Report: {page} (one file, opens offline) and {options.output_dir / 'report.md'}")
    return 0


def as_text(comparison: Comparison) -> str:
    """The tables as plain text."""
    return "\n\n".join(
        [
            *(headline(comparison), " ".join(verdict(comparison)), *comparison.notes),
            *(f"{t.title}\n{aligned([t.columns, *(row.cells for row in t.rows)])}" for t in tables(comparison)),
        ]
    )
