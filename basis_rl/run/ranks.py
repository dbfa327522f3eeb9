"""What one process does for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

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
    if state.num_processes > 1:
        broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    result: T = outcome[0]
    return result
