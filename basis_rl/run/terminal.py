"""What reaches a terminal: no control sequences from a model, a data set or a server; and nothing once it is gone."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from basis_rl.text import HARMFUL, shown_code

# Colours, and what progress bars need: up a line, clear the line, back to its start.
_ALLOWED = re.compile(rf"(\x1b\[[0-9;]*[mAK]|\r)|{HARMFUL}")


class Terminal:
    """A text stream that shows other control characters by their codes, and drops what a lost terminal refuses."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(self._stream.write, _ALLOWED.sub(lambda found: found[1] or shown_code(found[0]), text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, do: Any, *given: Any) -> None:
        try:
            do(*given)
        except OSError as error:
            # The terminal or its connection was closed. A pipe's reader that has gone is EPIPE.
            if error.errno != errno.EIO:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded_output() -> Iterator[None]:
    """Within it ``sys.stdout`` and ``sys.stderr`` are a `Terminal`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (each if isinstance(each, Terminal) else Terminal(each) for each in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
