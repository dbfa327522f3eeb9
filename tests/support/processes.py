"""Processes below this one: which there are, which have ended, and waiting for what they do."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Until it is true, for so long at most."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def stat(pid: int) -> list[str]:
    """State, parent and what follows in the kernel's line about a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def gone(pid: int) -> bool:
    try:
        return stat(pid)[0] in "ZX"
    except OSError:
        return True


def descendants(root: int) -> list[int]:
    """Processes below `root`, by the kernel's own lists."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # has ended meanwhile, as may each of its threads
        for thread in os.listdir(f"/proc/{root}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, Path(f"/proc/{root}/task/{thread}/children").read_text().split()):
                    found += [child, *descendants(child)]
    return found
