"""A `flock` on the run's folder, which the kernel releases when the process ends, however it ends."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from basis_rl.run import checkpoint
from basis_rl.run.artefacts import lock
from basis_rl.run.errors import FolderLost
from basis_rl.run.ranks import gathered, on_main_process

_FILE = ".claim"
_PR_SET_PDEATHSIG = 1
# The process that started this one, as long as it lives.
_launcher = os.getppid()
# Folder -> descriptor, what its file says, and which folder it was.
_held: dict[Path, tuple[int, dict[str, Any], os.stat_result]] = {}


@contextmanager
def held(output_dir: str | Path) -> Iterator[str]:
    """Keep other runs out of the folder: within it, the main process holds a `flock` on a file there.

    May be nested. Where the file system has no locks nothing is held. Yields the name of the run, which all of its
    resumes have.

    Raises:
        ValueError: another run has it, it cannot be a folder, or one of the ranks does not see it. On every rank.
        FolderLost: something within it failed, and the folder was removed or renamed.
    """
    folder = Path(output_dir).absolute()
    is_outermost, owner = on_main_process(lambda: _take(folder))
    blind = gathered(None if not is_outermost or _sees(folder, owner) else socket.gethostname())
    try:
        if missing := sorted({host for host in blind if host is not None}):
            raise ValueError(
                f"output_dir '{folder}' on {owner['host']}, the machine of the first rank, is not the folder of this "
                f"name on {', '.join(missing)}. Put it on a network file system: all ranks write into it."
            )
        yield str(owner["run"])
    except Exception:
        # If the folder is gone, this says so instead of the error of some write into it.
        check_place(folder)
        raise
    finally:
        if is_outermost:
            _give_back(folder)


def _take(folder: Path) -> tuple[bool, dict[str, Any]]:
    """Lock the folder for this process. Returns False if it was ours already, and what its file says of this run."""
    if folder in _held:
        return False, _held[folder][1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        path = next(path for path in (folder, *folder.parents) if path.is_symlink() or path.exists())
        what = f"is a link to '{path.readlink()}', which is not there" if path.is_symlink() else "is not a folder"
        raise ValueError(f"output_dir: '{path}' {what}. Remove it, or take another output_dir.") from error
    descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o644)
    if not lock(descriptor, wait=False):
        owner = _owner(os.read(descriptor, 4096))
        os.close(descriptor)
        who = f": process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}" if owner else ""
        raise ValueError(
            f"'{folder}' is the output_dir of a run that is still going on{who}. Wait for it, end it (`kill PID`: it "
            "writes a checkpoint), or take another output_dir."
        )
    run = _owner(os.read(descriptor, 4096)).get("run", uuid.uuid4().hex)
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    # All resumes of a run have its name; the start tells this one from a file that an earlier one has left.
    owner |= {"run": run, "start": uuid.uuid4().hex}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        # Other machines see it then.
        os.fsync(descriptor)
    except OSError:
        # The disk may be full.
        os.close(descriptor)
        raise
    _held[folder] = (descriptor, owner, folder.stat())
    return True, owner


def _owner(said: bytes) -> dict[str, Any]:
    """What the lock's file says of the run that holds it; empty if it says nothing that can be read."""
    with suppress(ValueError, TypeError):
        return dict(json.loads(said))
    return {}


def check_place(output_dir: str | Path) -> None:
    """Refuse to write if the folder that is held has been removed or renamed: a new one would hold half a run.

    Raises:
        FolderLost: it was removed or renamed.
    """
    folder = Path(output_dir).absolute()
    if folder in _held and not (folder.exists() and os.path.samestat(folder.stat(), _held[folder][2])):
        raise FolderLost(
            f"'{folder}' was removed or renamed while the run was going on, with what the run had written. If it is "
            "elsewhere, resume it there with resume_from_checkpoint: auto; else start again."
        )


def _sees(folder: Path, owner: dict[str, Any]) -> bool:
    """Whether the file that the first rank has written is here; a network file system may take a while."""
    deadline = time.monotonic() + checkpoint.PATIENCE
    while True:
        with suppress(OSError):
            if _owner((folder / _FILE).read_bytes()) == owner:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def _give_back(folder: Path) -> None:
    # Only the main rank holds the folder.
    if folder not in _held:
        return
    descriptor, *_ = _held.pop(folder)
    # Some file systems have no locks.
    with suppress(OSError):
        # Closing alone would leave the lock with a child process that still has the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _forget() -> None:
    """Called in a forked child: with an open descriptor it would hold the lock even after the run has ended."""
    global _launcher
    _launcher = os.getppid()
    for descriptor, *_ in _held.values():
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


def break_abandoned_locks(root: Path | None = None, patience: float = 300.0) -> list[Path]:
    """Remove the lock files of compilations that no process is working on, and warn about each.

    torch takes a lock by creating a file, which it holds open; the next process waits silently until the file is gone,
    however long. A process that is killed meanwhile leaves it, and every later run hangs at its start. So a lock that
    no process of this machine has open, and that is older than `patience` seconds, counts as abandoned. A younger one
    may belong to another machine that compiles in the same folder, so it stays.

    Args:
        root: where extensions are compiled; default as in torch (``TORCH_EXTENSIONS_DIR``, else the user's cache).

    Returns:
        The files removed.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) if root is None else root
    removed: list[Path] = []
    while unheld := _unheld_locks(root):
        path, age = unheld[0]
        if age >= patience:
            path.unlink(missing_ok=True)
            removed.append(path)
            warnings.warn(f"Removed {path}: a process that was compiling an extension died and left it.", stacklevel=2)
        else:
            print(f"Waiting for {path}, up to {patience - age:.0f} s: another machine may be compiling.", flush=True)
            time.sleep(min(10.0, patience - age))
    return removed


def _unheld_locks(root: Path) -> list[tuple[Path, float]]:
    """Lock files under `root` that no process here has open, and their ages in seconds."""
    ages = {}
    for path in sorted(root.glob("**/lock")):
        # Its holder may have just finished and removed it.
        with suppress(FileNotFoundError):
            # The clock may have been set back since.
            ages[path] = abs(time.time() - path.stat().st_mtime)
    if not ages:
        return []
    # Of other users' processes psutil may not know the files: there is None in their place.
    processes = psutil.process_iter(["open_files"])
    in_use = {file.path for process in processes for file in process.info["open_files"] or ()}
    return [(path, age) for path, age in ages.items() if str(path.resolve()) not in in_use]
