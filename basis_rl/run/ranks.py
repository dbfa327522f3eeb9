"""What one process does for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

T = TypeVar("T")


def on_main_process(work: Callable[[], T]) -> T:
    """Return on all processes what `work` returns on the main one; raise its exception on all, so that none waits."""
    state = PartialState()
    outcome: list[Any] = [None]
    if state.is_main_process:
        try:
            outcome = [work()]
        except Exception as error:
            outcome = [error]
    broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def gathered(value: T) -> list[T]:
    """The `value` of each process, in their order, on all of them."""
    return gather_object([value])


def require_same(values: Mapping[str, Any]) -> None:
    """Compare `values`, JSON by name, with those of the first rank. Collective.

    Raises:
        ValueError: they differ. On every rank, with each name, this rank's value and the first one's.
    """
    first = on_main_process(lambda: values)
    pairs = {name: (values.get(name), first.get(name)) for name in sorted({*values, *first})}
    shown = ", ".join(f"{name} {mine}, {its}" for name, (mine, its) in pairs.items() if mine != its)
    mine = shown and f"the settings of rank {PartialState().process_index} differ from rank 0's: {shown}"
    if told := "; ".join(filter(None, gathered(mine))):
        raise ValueError(f"{told}. All ranks need the same settings, data, reward functions and versions.")
