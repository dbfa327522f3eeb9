"""What one process does for all of them."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
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
    if message := "; ".join(filter(None, gathered(mine))):
        raise ValueError(f"{message}. All ranks need the same settings, data, reward functions and versions.")


def asked_processes() -> int:
    """How many processes ``accelerate launch`` was asked for that started this one alone; 1 where it did not.

    With ``--cpu`` it starts one, whatever ``--num_processes`` says, and passes the number on to nobody.
    """
    words: list[str] = []
    with suppress(OSError):
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    if "WORLD_SIZE" in os.environ or "launch" not in words or not any("accelerate" in word for word in words):
        return 1
    parser = ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--num_processes", "--num-processes", type=int, default=1)
    return int(parser.parse_known_args(words)[0].num_processes)
