"""What TRL logs, kept apart: training from evaluation, function from function, numbers from what is none."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where several are the same: two lambdas would share one metric."""
    return [
        f"{name}_{names[:index].count(name) + 1}" if name in names[:index] else name for index, name in enumerate(names)
    ]


def of_kind(rows: Any, size: int) -> Any:
    """An empty table of rollouts of the kind of `rows`, or of one for each column, that keeps the last `size`."""
    return deque(maxlen=size) if isinstance(rows, deque) else defaultdict(lambda: deque(maxlen=size))


@contextmanager
def set_aside(table: Path | None, name: str) -> Iterator[None]:
    """What is written to `table` within it gets `name`, and what was there before stays; None: nothing is written."""
    if table is None:
        yield
        return
    kept = table.with_suffix(".kept")
    if table.exists():
        table.replace(kept)
    try:
        yield
    finally:
        if table.exists():
            table.replace(table.with_name(name))
        if kept.exists():
            kept.replace(table)


def without_infinities(logs: dict[str, Any], metrics: Mapping[str, list[float]]) -> None:
    """Take out, in place, what JSON has no number for; TRL logs None for a metric whose values are all NaN."""
    for values in metrics.values():
        if any(map(math.isinf, values)):
            values[:] = [math.nan]
    for name, value in logs.items():
        if isinstance(value, float) and not math.isfinite(value):
            logs[name] = None
