r"""What counts as right, as a table: Math-Verify's acceptances that can be switched off.

docs/rewards.md shows it, and where this grading differs from Math-Verify's; tests/rewards/math/test_rules.py pins every
row of both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from basis_rl.names import did_you_mean

# Raised with every change of what counts as right, so that two gradings are never mixed.
RULES = 8


@dataclass(frozen=True)
class Quirk:
    """An answer that Math-Verify takes for the gold though a strict reader might not, with one example."""

    what: str
    gold: str
    answer: str


QUIRKS: dict[str, Quirk] = {
    "percent_as_fraction": Quirk("a percentage for the fraction that it is", "0.5", r"50\%"),
    "percent_as_number": Quirk("a percentage for its number, the sign ignored", "50", r"50\%"),
    "assignment": Quirk("a variable or function set to the value", "2", "x=2"),
    "equation": Quirk("any equation for its right side", "5", "2+3=5"),
    "set_for_tuple": Quirk("a set in braces for a tuple, or the other way round", "(1,2)", r"\{1,2\}"),
    "list_for_tuple": Quirk("a bare list for a tuple, or the other way round", "(1,2)", "1,2"),
    "singleton_set": Quirk("a set of one element for the element", "5", r"\{5\}"),
    "list_order": Quirk("a bare list in another order", "1,2", "2,1"),
    "duplicates": Quirk("an element of a list or set twice", "1,2", "1,1,2"),
    "brackets": Quirk("other brackets around a tuple, or a vector for it", "(3,2)", "[3,2]"),
    "set_for_relation": Quirk("the interval or set for an inequality", "x>2", r"(2,\infty)"),
    "units": Quirk("a unit left out, added or another one", "5", r"5\text{ cm}"),
    "currency": Quirk("a dollar sign left out or added", "5", r"\$5"),
    "degrees": Quirk("a degree sign left out or added", "90", r"90^\circ"),
    "case": Quirk("capitals for small letters", "x", "X"),
    "text": Quirk("a word in or out of \\text{}", r"\text{east}", "east"),
    "rounding": Quirk("a decimal for what rounds to it at six digits", r"\frac{1}{3}", "0.333333"),
    "base": Quirk("the base of a numeral left out, added or another one", "11_2", "11"),
    "approximation": Quirk("what stands left of an approximation sign", r"\pi", r"\pi \approx 3.14"),
    "ratio": Quirk("a ratio for the fraction", r"\frac{3}{2}", "3:2"),
}


def refused(allow: Collection[str] | None) -> tuple[str, ...]:
    """The quirks that are not in `allow`, in the order of `QUIRKS`; none where it is None.

    Raises:
        ValueError: a name in `allow` that is none of `QUIRKS`.
    """
    if allow is None:
        return ()
    for name in allow:
        if name not in QUIRKS:
            hint = did_you_mean(name, QUIRKS)
            raise ValueError(f"allow: Math-Verify has no quirk '{name}'.{hint} Known: {', '.join(QUIRKS)}.")
    return tuple(name for name in QUIRKS if name not in allow)
