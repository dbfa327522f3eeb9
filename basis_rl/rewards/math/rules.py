"""Math-Verify's acceptances that can be switched off, by name.

docs/rewards.md shows an example of each, and where this grading differs from Math-Verify's;
tests/rewards/math/test_rules.py checks every row of both tables.
"""

from __future__ import annotations

from collections.abc import Collection

from basis_rl.names import did_you_mean

# Raised with every change of what counts as right, so that two gradings are never mixed.
RULES = 9

QUIRKS = (
    "percent_as_fraction", "percent_as_number", "assignment", "equation", "set_for_tuple", "list_for_tuple",
    "singleton_set", "list_order", "duplicates", "brackets", "set_for_relation", "units", "other_units", "currency",
    "degrees", "case", "text", "rounding", "base", "other_base", "approximation", "ratio",
)  # fmt: skip
"""Names of what Math-Verify takes for the gold though a strict reader might not."""

DEFAULT_QUIRKS = tuple(name for name in QUIRKS if name not in ("other_units", "other_base"))
"""Those that count if nothing is said: not another unit or base, where gold and answer both have one."""


def refused(allow: Collection[str] | None) -> tuple[str, ...]:
    """The quirks that are not in `allow`, in the order of `QUIRKS`; None allows `DEFAULT_QUIRKS`.

    Raises:
        ValueError: a name in `allow` that is none of `QUIRKS`.
    """
    if allow is None:
        allow = DEFAULT_QUIRKS
    for name in allow:
        if name not in QUIRKS:
            hint = did_you_mean(name, QUIRKS)
            raise ValueError(f"allow: Math-Verify has no quirk '{name}'.{hint} Known: {', '.join(QUIRKS)}.")
    return tuple(name for name in QUIRKS if name not in allow)
