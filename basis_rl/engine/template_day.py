"""The date that chat templates write into prompts: the first day of a run, or of the value table that it uses.

Templates of Llama 3.2, Granite and gpt-oss ask `strftime_now` for today's date. After midnight the same prompts would
read differently: to a value function, in the log-probabilities of rollouts, and in the check that a resume continues
the same run. A run keeps its first day in its checkpoints, a value table in its provenance; a run with a table has the
table's.
"""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

from transformers.utils import chat_template_utils

_fixed: list[str] = []


def template_day() -> str:
    """The day of this process's templates, as ``2026-11-25``; from the first call on it stays the same."""
    if not _fixed:
        use_day(date.today().isoformat())
    return _fixed[0]


def use_day(day: str) -> None:
    """Let chat templates write this day, whichever it is."""

    class OnThatDay(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromisoformat(day)

    _fixed[:] = [day]
    chat_template_utils.datetime = OnThatDay  # type: ignore[attr-defined]
