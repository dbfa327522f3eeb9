"""Folders that somebody hostile has filled: as deep as they like, with names and modes as they like."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

# What a file counts at least, so that many empty files reach the limit as well.
_ENTRY_BYTES = 4096


def remove_folder(folder: str) -> None:
    """Remove `folder` and all that is in it, following no link; what cannot be removed is left, without an error.

    Each folder is first moved up to the top level, so that no path gets too long and no recursion too deep. No process
    may write to it any more.
    """
    before: list[str] = []
    with contextlib.suppress(OSError):
        _open_up(folder)
        while (names := os.listdir(folder)) != before:
            before = names
            for name in names:
                _take_apart(f"{folder}/{name}", folder)
        os.rmdir(folder)


def _take_apart(path: str, top: str) -> None:
    """Remove a file, or a folder whose own folders are moved to `top`."""
    with contextlib.suppress(OSError):
        if not _open_up(path):
            os.unlink(path)
            return
        for name in os.listdir(path):
            below = f"{path}/{name}"
            with contextlib.suppress(OSError):
                if _open_up(below):
                    os.rename(below, f"{top}/{os.urandom(16).hex()}")
                else:
                    os.unlink(below)
        os.rmdir(path)


def _open_up(path: str) -> bool:
    """Whether it is a folder; if so, let its owner do everything there."""
    is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    if is_folder:
        os.chmod(path, stat.S_IRWXU)
    return is_folder


def used_bytes(folder: str, enough: int) -> int:
    """Bytes on disk below `folder`, at least 4096 for each file; more than `enough` where it cannot be counted."""
    total = 0
    waiting = [folder]
    while waiting and total <= enough:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    total += max(_ENTRY_BYTES, 512 * status.st_blocks)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
                    if total > enough:
                        break
        except OSError as error:
            # Too deep for a path: files are hidden there on purpose.
            if error.errno == errno.ENAMETOOLONG:
                return enough + 1
    return total
