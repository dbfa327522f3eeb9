"""``basis-rl quickstart [EXAMPLE]``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from basis_rl import resources
from basis_rl.names import did_you_mean


def main(argv: Sequence[str]) -> int:
    """Run an example that comes with the package; all other words are its own options."""
    is_named = bool(argv) and not argv[0].startswith("-")
    example = argv[0] if is_named else resources.EXAMPLES[0]
    if example not in resources.EXAMPLES:
        near = did_you_mean(example, resources.EXAMPLES)
        raise ValueError(f"There is no example '{example}'.{near} Examples: {', '.join(resources.EXAMPLES)}.")
    importlib.import_module(f"examples.{example}.run").main(argv[is_named:])
    return 0
