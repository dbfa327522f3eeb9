"""BibTeX of the papers behind baselines and objectives: ``citations.bib``, with their names above each entry."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def papers() -> dict[str, str]:
    """Name of a baseline or an objective (and ``trl``) -> its entry."""
    blocks = Path(__file__).with_name("citations.bib").read_text(encoding="utf-8").strip().split("\n\n")
    named = [block.removeprefix("% ").split("\n", 1) for block in blocks]
    return {name: entry for names, entry in named for name in names.split()}


def citations(baseline: str, objective: str | None = None) -> list[str]:
    """BibTeX entries: the baseline's paper (none for your own class), the objective's, TRL's; each once."""
    known = papers()
    return list(dict.fromkeys(known[name] for name in (baseline, objective, "trl") if name in known))
