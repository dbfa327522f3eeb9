"""Errors that a full disk causes, reported as such, and how much space a checkpoint needs."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from basis_rl.run.errors import DiskFull

GIB = float(1 << 30)
# A file system may refuse a write while it still reports this many bytes as free.
_MARGIN = 1 << 20


def free_bytes(folder: str | Path) -> int:
    """What can be written at `folder`, which need not be there yet."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def checkpoint_bytes(parameters: int, trainable: int, weight_bytes: float, optimizer_bytes: float = 8.0) -> float:
    """Size of a checkpoint: weights, and what the optimizer keeps of each trained parameter.

    Args:
        parameters: that are saved.
        trainable: those with a state of the optimizer.
        weight_bytes: of a saved parameter.
        optimizer_bytes: of its state; two float32 moments of Adam by default. DeepSpeed keeps float32 weights too: 12.
    """
    return parameters * weight_bytes + trainable * optimizer_bytes


@contextmanager
def naming_a_full_disk(
    output_dir: str | Path, needed: float | None = None, *, only_writes: bool = True
) -> Iterator[None]:
    """Turn errors that a full disk causes into a `DiskFull`, which says how much a checkpoint needs.

    Args:
        output_dir: where is written.
        needed: bytes of a checkpoint, if one is being written.
        only_writes: nothing but writing happens within it, so with no space left any error is taken for a full disk.

    Raises:
        DiskFull: whatever torch, safetensors or Python raised; some of their errors only say that a write failed.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        free = free_bytes(output_dir)
        full = any(_says_full(each) for each in (error, error.__cause__))
        if not full and (free > _MARGIN or not only_writes):
            raise
        what = "" if needed is None else f" A checkpoint needs about {needed / GIB:.2f} GiB beside those that are kept."
        raise DiskFull(
            f"The disk of '{output_dir}' is full: {free / GIB:.2f} GiB are free.{what} Make room, or lower "
            "save_total_limit, then resume with resume_from_checkpoint: auto; earlier checkpoints are whole."
        ) from error


def _says_full(error: BaseException | None) -> bool:
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
