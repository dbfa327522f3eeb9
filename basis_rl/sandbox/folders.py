"""Folders that somebody hostile has filled: as deep as they like, with names and modes as they like."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

_ENTRY_BYTES = 4096  # what a file without content takes, at the least: so many files are many bytes
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_folder(folder: str) -> None:
    """Remove `folder` and all that is in it, following no link; what cannot be removed is left, without an error.

    By descriptors, one level open at a time: neither the length of a path nor recursion ends it. Nobody may be at work
    in it any more.
    """
    try:
        current = os.open(folder, _OPEN_FOLDER)
    except OSError:
        return
    pending, names = [_clear(current)], []
    while True:
        if pending[-1]:
            name = pending[-1].pop()
            below = _enter(current, name)
            if below is not None:
                os.close(current)
                current = below
                pending.append(_clear(current))
                names.append(name)
            continue
        pending.pop()
        if not pending:
            break
        above = os.open("..", _OPEN_FOLDER, dir_fd=current)
        os.close(current)
        current = above
        _quietly_remove(names.pop(), current)
    os.close(current)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _clear(current: int) -> list[str]:
    """Remove what is no folder or an empty one; the names of the others."""
    left = []
    try:
        os.fchmod(current, stat.S_IRWXU)
        entries = os.listdir(current)
    except OSError:
        return []
    for name in entries:
        try:
            os.unlink(name, dir_fd=current)
        except OSError:
            if not _quietly_remove(name, current):
                left.append(name)
    return left


def _enter(current: int, name: str) -> int | None:
    try:
        if stat.S_ISDIR(os.lstat(name, dir_fd=current).st_mode):  # chmod would follow a link
            os.chmod(name, stat.S_IRWXU, dir_fd=current)
        return os.open(name, _OPEN_FOLDER, dir_fd=current)
    except OSError:
        return None


def _quietly_remove(name: str, current: int) -> bool:
    try:
        os.rmdir(name, dir_fd=current)
    except OSError:
        return False
    return True


def used_bytes(folder: str, enough: int) -> int:
    """Bytes on disk below `folder`, at least 4096 for each file; more than `enough` where it cannot be counted."""
    total, waiting = 0, [folder]
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
            if error.errno == errno.ENAMETOOLONG:  # so deep that somebody wants to hide
                return enough + 1
    return total
