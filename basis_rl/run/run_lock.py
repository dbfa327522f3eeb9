"""Whose folder it is: a lock for the time of a run, which the kernel takes back however the run ends."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from basis_rl.run.artefacts import lock
from basis_rl.run.ranks import on_main_process

_FILE = ".claim"
_PR_SET_PDEATHSIG = 1
_launcher = os.getppid()  # as long as it lives
_held: dict[Path, tuple[int, int]] = {}  # folder -> descriptor, how often it was taken


@contextmanager
def held(output_dir: str | Path) -> Iterator[None]:
    """The folder is this run's within it, on all ranks; the main process holds a `flock` on a file there.

    May be nested. Where the file system has no locks nothing is held.

    Raises:
        ValueError: another run has it. On every rank.
    """
    folder = Path(output_dir).absolute()
    on_main_process(lambda: _take(folder))
    try:
        yield
    finally:
        _give_back(folder)


def _take(folder: Path) -> None:
    if folder in _held:
        descriptor, times = _held[folder]
        _held[folder] = descriptor, times + 1
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o644)
    if not lock(descriptor, wait=False):
        said = os.read(descriptor, 4096)
        os.close(descriptor)
        raise ValueError(
            f"'{folder}' is the output_dir of a run that is still going on{_who(said)}. Two runs in one folder destroy "
            "each other's checkpoints: wait for it, end it (`kill PID`: it writes a checkpoint), or take another "
            "output_dir."
        )
    os.ftruncate(descriptor, 0)
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)
    _held[folder] = descriptor, 1


def _who(said: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError):
        owner = json.loads(said)
        return f": process {owner['pid']} on {owner['host']}, since {owner['since']}"
    return ""


def _give_back(folder: Path) -> None:
    if folder not in _held:  # of a rank that is not the main one
        return
    descriptor, times = _held.pop(folder)
    if times > 1:
        _held[folder] = descriptor, times - 1
        return
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing would do, but for a child that has not forgotten it yet
    os.close(descriptor)


def _forget() -> None:
    """In a forked child, whose launcher is its parent: with an open descriptor it would hold the lock for longer than
    the run lives."""
    global _launcher
    _launcher = os.getppid()
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def end_with_launcher() -> None:
    """Of several ranks: let the kernel send this one SIGTERM when its launcher ends, SIGKILL included.

    A rank that outlives its launcher would train on, unseen, and keep the folder. Of a launcher that ended before
    this was called the kernel tells nothing: then the signal comes at once. (One that ended before this module was
    imported takes the ranks' common store with it, so that they cannot meet.)
    """
    if sys.platform != "linux" or not ({"LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & set(os.environ)):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != _launcher:
        os.kill(os.getpid(), signal.SIGTERM)
