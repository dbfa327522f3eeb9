"""``basis-rl rollouts RUN``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from basis_rl.cli.options import rollouts_parser
from basis_rl.report.rollouts import ask_math_verify, choose, page, text

_SHOWN = 20
_ON_PAGE = 500


def main(argv: Sequence[str]) -> int:
    """Print the rollouts that were asked for, or write them as a page."""
    options = rollouts_parser().parse_args(list(argv))
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {options.limit}.")
    rows = choose(
        options.output_dir,
        options.step or ("all" if options.page else "last"),
        below=options.reward_below,
        above=options.reward_above,
        prompt=options.prompt,
        verdict=options.verdict,
        sort=options.sort,
        limit=options.limit or (_ON_PAGE if options.page else _SHOWN),
    )
    if options.ask_math_verify:
        ask_math_verify(rows)
    if not rows:
        print("No rollout of these steps fits. --step all looks in all of them.")
    elif options.page:
        options.page.write_text(page(rows, f"Rollouts of {options.output_dir.absolute().name}"), encoding="utf-8")
        print(f"Page: {options.page} ({len(rows)} rollouts, one file, opens offline)")
    else:
        # Not every terminal has the letters of every model.
        encoding = sys.stdout.encoding or "utf-8"
        print(text(rows).encode(encoding, "backslashreplace").decode(encoding))
    return 0
