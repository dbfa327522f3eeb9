"""Locks that a killed process left on the extensions which torch and DeepSpeed compile at their first use."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root


def break_abandoned_locks(root: Path | None = None, patience: float = 300.0) -> list[Path]:
    """Remove the lock files of compilations that no process is working on, and warn about each.

    torch takes a lock by creating a file, which it holds open; whoever comes next waits, without a word and without an
    end, until the file is gone. A process that is killed meanwhile leaves it, and every later run hangs at its start.
    A lock that no process of this machine has open, and that is older than `patience` seconds, is taken for such a
    one; a younger one is waited for, since the folder may be shared with a machine that is compiling. Does
    nothing where a process's open files cannot be read (anywhere but on Linux).

    Args:
        root: where extensions are compiled; default as in torch (``TORCH_EXTENSIONS_DIR``, else the user's cache).

    Returns:
        The files removed.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) if root is None else root
    removed: list[Path] = []
    while unheld := _unheld_locks(root):
        lock, age = unheld[0]
        if age >= patience:
            lock.unlink(missing_ok=True)
            removed.append(lock)
            warnings.warn(f"Removed {lock}: a process that was compiling an extension died and left it.", stacklevel=2)
        else:
            print(f"Waiting for {lock}, up to {patience - age:.0f} s: another machine may be compiling.", flush=True)
            time.sleep(min(10.0, patience - age))
    return removed


def _unheld_locks(root: Path) -> list[tuple[Path, float]]:
    """Lock files under `root` that no process here has open, and their ages in seconds."""
    if not Path("/proc/self/fd").is_dir():
        return []
    ages = {}
    for lock in sorted(root.glob("**/lock")):
        try:
            ages[lock] = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            continue  # its holder has just finished
    held = _open_files() if ages else set()
    return [(lock, age) for lock, age in ages.items() if str(lock.resolve()) not in held]


def _open_files() -> set[str]:
    """Paths that processes of this machine have open, as far as this user may see."""
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            links = os.listdir(process / "fd")
        except OSError:
            continue  # has ended meanwhile, or is another user's
        for link in links:
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(process / "fd" / link))
    return found
