"""Whether reward functions and environments work outside of the main thread, where streamed rollouts use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from basis_rl.rewards.call import call

# Seconds that a trial may take. What takes longer, such as a judge that is not there yet, is not judged.
_PATIENCE = 30.0


def check_in_threads(what: str, tried: Any, *works: Callable[[], Any]) -> None:
    """Do several things one after the other, each in a thread of its own.

    Args:
        what: the kind of thing that is tried, for the message.
        tried: the thing, which has a name.
        *works: of which a later one may use what an earlier one has made.

    Raises:
        ValueError: they fail there, and not in this thread. What fails everywhere has another fault.
    """
    failed = _failures_elsewhere(*works)
    if not failed:
        return
    try:
        for work in works:
            work()
    except Exception:
        return
    name = getattr(tried, "__name__", type(tried).__name__)
    error = failed[0].__cause__ or failed[0]
    raise ValueError(
        f"rollouts: stream uses the {what} '{name}' in several threads, where it fails: {type(error).__name__}: "
        f"{str(error)[:300]}. Signals (signal.alarm) work in the main thread only, and some objects (sqlite3's) where "
        "they were made. Change it, or set rollouts to sync."
    ) from error


def _failures_elsewhere(work: Callable[[], Any], *later: Callable[[], Any]) -> list[Exception]:
    """What the first of them raises that does; a thread lives until later ones have ended, so they differ."""
    failed: list[Exception] = []

    def attempt() -> None:
        try:
            work()
            failed.extend(_failures_elsewhere(*later) if later else [])
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return failed


def check_reward(function: Callable[..., Any], row: Mapping[str, Any]) -> None:
    """Score an answer to `row` in another thread. What needs more, such as ``environments``, fails in any thread."""
    rows = [{"prompt": "", **row}]
    check_in_threads("reward function", function, lambda: call(function, rows, [("1", [0], False)]))


def check_environment(factory: Callable[[], Any], row: Mapping[str, Any]) -> None:
    """Make an environment in one thread and reset it in another one."""
    made: list[Any] = []
    check_in_threads("environment", factory, lambda: made.append(factory()), lambda: made[-1].reset(**row))
