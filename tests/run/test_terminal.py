"""What reaches a terminal: nothing that controls it, and nothing that ends a run once it is gone."""

import errno
import io
import os
import pty
import signal
import sys

import pytest

from basis_rl.run.terminal import Terminal, guarded_output
from basis_rl.trainer.faults import StopOnSignal


class Gone(io.StringIO):
    """A terminal that was closed, or a pipe whose reader has gone."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))

    def flush(self):
        self.write("")


@pytest.mark.parametrize(
    "harm",
    ["\x1b]0;title\x07", "\x1b[2J", "\x1b[?1049h", "\x1b]52;c;aGk=\x07", "\x9b2J", "\x1bc", "\u202e", "\x1b[5;1H"],
)
def test_control_sequences_are_shown(harm):
    written = io.StringIO()
    Terminal(written).write(f"a{harm}b")
    assert harm not in written.getvalue()
    assert written.getvalue()[0] + written.getvalue()[-1] == "ab"
    # A sequence in two parts is none either.
    halves = io.StringIO()
    for character in harm:
        Terminal(halves).write(character)
    assert halves.getvalue() == written.getvalue()[1:-1]


def test_texts_colours_and_progress_bars_stay():
    text = "Zwei Wörter\n\t数学 \U0001f600 \x1b[1;31mred\x1b[0m\r 3%\x1b[A\x1b[K"
    written = io.StringIO()
    assert Terminal(written).write(text) == len(text)
    assert written.getvalue() == text


def test_all_that_is_printed_within_is_guarded(capsys):
    with guarded_output(), guarded_output():
        print("\x1b[2J")
        print("\x1b[2J", file=sys.stderr)
    print("\x1b[2J")
    shown = capsys.readouterr()
    assert shown.out == "\\x1b[2J\n\x1b[2J\n"
    assert shown.err == "\\x1b[2J\n"


def test_a_terminal_that_is_gone_takes_nothing_and_a_pipe_says_so():
    gone = Terminal(Gone(errno.EIO))
    assert gone.write("a") == 1
    gone.flush()
    with pytest.raises(OSError, match="Broken pipe"):
        Terminal(Gone(errno.EPIPE)).write("a")


def test_a_terminal_that_is_closed():
    """Not made up: the other end of a pseudo-terminal."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        os.close(ours)
        with pytest.raises(OSError, match="Input/output"):
            print("a", file=stream, flush=True)
        print("a", file=Terminal(stream), flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), theirs)


@pytest.mark.parametrize("ignored", [True, False])
def test_a_closed_terminal_stops_a_run_unless_it_was_started_to_outlast_it(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    stopping = StopOnSignal(None)
    try:
        with stopping.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert bool(stopping.number) != ignored
        assert ignored or stopping.raised.args == (128 + signal.SIGHUP,)
    finally:
        signal.signal(signal.SIGHUP, before)
