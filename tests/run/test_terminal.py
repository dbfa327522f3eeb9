"""What reaches a terminal: nothing that controls it, and nothing that ends a run once it is gone."""

import io
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser
from tqdm import tqdm

from basis_rl.cli.main import launch_training
from basis_rl.run.terminal import Terminal, guarded_output
from basis_rl.trainer.faults import StopOnSignal


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


def test_the_cursor_moves_only_where_a_text_begins():
    """A model could else write over what stands above its rollout."""
    written = io.StringIO()
    Terminal(written).write("said: \r\x1b[2A\x1b[Kreward 1.0")
    assert written.getvalue() == "said: \\x0d\\x1b[2A\\x1b[Kreward 1.0"


def test_texts_colours_and_progress_bars_stay():
    def shown(stream):
        stream.write("Zwei Wörter\n\t数学 \U0001f600 \x1b[1;31mred\x1b[0m\r\n")
        for _ in tqdm(range(3), file=stream, ncols=60, mininterval=0, bar_format="{n}"):
            for _ in tqdm(range(2), file=stream, ncols=60, mininterval=0, leave=False, bar_format="{n}"):
                tqdm.write("a line", file=stream)

    plain, through = io.StringIO(), io.StringIO()
    guarded = Terminal(through)
    # In one run, since bars depend on the time.
    both = io.StringIO()
    both.write = lambda text: (plain.write(text), guarded.write(text))[1]
    shown(both)
    assert {"\r", "\x1b[A"} <= set(re.findall(r"\r|\x1b\[A", plain.getvalue()))
    assert through.getvalue() == plain.getvalue()


def test_all_that_is_printed_within_is_guarded(capsys):
    with guarded_output(), guarded_output():
        print("\x1b[2J")
        print("\x1b[2J", file=sys.stderr)
    print("\x1b[2J")
    shown = capsys.readouterr()
    assert shown.out == "\\x1b[2J\n\x1b[2J\n"
    assert shown.err == "\\x1b[2J\n"


def test_the_traceback_of_an_error_is_guarded():
    """Python writes it when the command has ended already."""
    code = "from basis_rl.run.terminal import guarded_output\nwith guarded_output(): raise OSError('\\x1b[2J')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "OSError: \\x1b[2J" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_no_terminal_that_is_gone():
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space"):
        Terminal(io.TextIOWrapper(full, write_through=True)).write("a")


def closed_terminal():
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def closed_pipe():
    ours, theirs = os.pipe()
    os.close(ours)
    return theirs


@pytest.mark.parametrize("closed", [closed_terminal, closed_pipe])
def test_no_reader_no_error(closed):
    """Not made up: the other end of a pseudo-terminal, or of a pipe."""
    with pytest.raises(OSError, match=r"Input/output|Broken pipe"), os.fdopen(closed(), "w") as stream:
        print("a", file=stream, flush=True)
    # Closing it writes what is left in its buffer.
    with os.fdopen(closed(), "w") as stream:
        for _ in range(3):
            print("a", file=Terminal(stream), flush=True)


def test_a_program_without_streams(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with guarded_output():
        print("a", flush=True)
    assert sys.stdout is None


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


@pytest.mark.parametrize("ignored", [True, False])
def test_a_launcher_leaves_a_signal_alone_that_nohup_ignores(ignored, monkeypatch):
    """Torchrun handles SIGHUP otherwise, whatever it was started with."""
    monkeypatch.setattr("os.execv", lambda *words: None)
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "")
    monkeypatch.delenv("PET_SIGNALS_TO_HANDLE")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        launch_training(["recipe.yaml", "--accelerate_config", "cpu"])
    finally:
        signal.signal(signal.SIGHUP, before)
    handled = get_args_parser().parse_args(["script.py"]).signals_to_handle.split(",")
    assert ("SIGHUP" in handled) != ignored
    assert "SIGTERM" in handled
