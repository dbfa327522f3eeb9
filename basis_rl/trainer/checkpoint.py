"""Checkpoints that are whole or not there: a mark while one is being written, removed last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

_MARK, _STATE = "INCOMPLETE", "trainer_state.json"
LAST = "last-checkpoint"  # in a repository on the Hub, as transformers calls it


def begin(folder: Path) -> None:
    """Mark `folder` as being written; whatever is in it no longer counts as a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    _sync(folder)


def finish(folder: Path) -> None:
    """Force all of `folder` to disk, then take the mark away."""
    for path in folder.rglob("*"):
        _sync(path)
    (folder / _MARK).unlink()
    _sync(folder)


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint was written to its end. One that another trainer wrote has no mark, and counts."""
    return (folder / _STATE).is_file() and not (folder / _MARK).exists()


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The folders ``checkpoint-N`` of a run, complete or not, by N."""
    found = []
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if number.isdigit() and path.is_dir():
            found.append((int(number), path))
    return [path for _, path in sorted(found)]


def newest(output_dir: str | Path) -> Path | None:
    """The complete checkpoint with the largest N; where there is none, a ``last-checkpoint`` pulled from the Hub."""
    places = [*reversed(checkpoints(output_dir)), Path(output_dir) / LAST]
    return next((path for path in places if is_complete(path)), None)


def rotate(output_dir: str | Path, limit: int | None, keep: Collection[str | Path] = ()) -> None:
    """Delete what is left of checkpoints that were cut off, and complete ones beyond the `limit` newest.

    Args:
        output_dir: the run's folder.
        limit: None or 0 keeps all, as in transformers.
        keep: checkpoints that stay in any case (the best one, those that are being uploaded).
    """
    whole = []
    for path in checkpoints(output_dir):
        if is_complete(path):
            whole.append(path)
        elif (path / _MARK).exists():
            shutil.rmtree(path, ignore_errors=True)
    kept = {Path(path).resolve() for path in keep}
    for path in whole[: -max(1, limit)] if limit else []:
        if path.resolve() not in kept:
            begin(path)  # a kill in the middle of the deletion must not leave half a checkpoint that looks whole
            shutil.rmtree(path, ignore_errors=True)


def resolve(asked: str | bool | None, output_dir: str | Path) -> str | None:
    """The checkpoint to resume from.

    Args:
        asked: a folder; ``True`` or ``"true"``, the newest complete checkpoint of `output_dir`; ``"auto"``, the same,
            or None where there is none yet; None, ``False`` or ``"false"``.
        output_dir: the run's folder.

    Raises:
        ValueError: there is none, or the one that is named was cut off while it was written.
    """
    word = str(asked).lower()
    if not asked or word == "false":
        return None
    if word in ("true", "auto"):
        found = newest(output_dir)
        if found is None and word == "true":
            raise ValueError(
                f"resume_from_checkpoint: {asked}, but there is no complete checkpoint in '{output_dir}'. "
                "`auto` starts from the beginning where there is none."
            )
        return None if found is None else str(found)
    folder = Path(str(asked))
    if not is_complete(folder):
        why = "was cut off while it was written" if (folder / _MARK).exists() else "is no checkpoint"
        other = newest(folder.parent)
        hint = f" The newest complete one beside it is '{other}'." if other else ""
        raise ValueError(f"resume_from_checkpoint: '{folder}' {why}.{hint}")
    return str(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
