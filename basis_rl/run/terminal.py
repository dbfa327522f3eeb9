"""What reaches a terminal: no control sequences from a model, a data set or a server; and nothing once it is gone."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from basis_rl.text import HARMFUL, shown_code

# Colours; and what moves the cursor or clears the line, but only where a text begins, as progress bars write it. What a
# model says stands behind words of ours.
_ALLOWED = re.compile(rf"(\A(?:[\r\n]|\x1b\[[0-9;]*[AK])+|\x1b\[[0-9;]*m|\r\n)|{HARMFUL}")


class Terminal:
    """A text stream that shows other control characters by their codes. Once its terminal was closed, or the reader of
    its pipe has ended, it takes everything and does nothing: a run must not end for want of a reader."""

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
            # The last one: it was closed within this process.
            if error.errno not in (errno.EIO, errno.EPIPE, errno.EBADF):
                raise
            # Also for what Python flushes when it ends, and for processes that are started from here on.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _guarded(stream: Any) -> Any:
    return stream if stream is None or isinstance(stream, Terminal) else Terminal(stream)


@contextmanager
def guarded_output() -> Iterator[None]:
    """Within it ``sys.stdout`` and ``sys.stderr`` are a `Terminal`. After an error they stay so, for its traceback."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_guarded, before)
    yield
    # Now, because at its end Python would flush the stream itself. There may be none.
    print(end="", flush=True)
    sys.stdout, sys.stderr = before


def stop_signals() -> set[signal.Signals]:
    """What asks a run to stop: SIGTERM, SIGUSR1, Ctrl-C, SIGHUP of a closed terminal unless ``nohup`` ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT} | (set() if ignored else {signal.SIGHUP})


@contextmanager
def handling_stop_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Within it, in the main thread, `handler` gets the signals that ask a run to stop."""
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
