"""Atomic checkpoints: a mark exists while one is being written, and a manifest of its files is written last."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import time
import zipfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from basis_rl.run.artefacts import write_whole
from basis_rl.run.errors import DiskFull

_MARK = "INCOMPLETE"
_STATE = "trainer_state.json"
MANIFEST = "manifest.json"
# As transformers calls them. Importing its constant takes 3 s, for which `compare` has no other reason.
PREFIX_CHECKPOINT_DIR = "checkpoint"
# In a repository on the Hub.
LAST = "last-checkpoint"
_THREADS = 8
# The first byte of the files of early versions of torch.
_PICKLE = b"\x80"
# Seconds until what one machine has written to a network file system must be seen on another.
PATIENCE = 60.0
# What a start from the beginning moves aside: what an earlier run has left in its folder.
_OF_A_RUN = ["*.json", "*.jsonl", "*.safetensors", "*.bin", "*.pt", "*.png", "*.jinja", "README.md", "recipe.yaml"]
_OF_A_RUN += [LAST, "completions", "rollouts"]
_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.bin", "adapter_model*.bin")
_logger = logging.getLogger(__name__)


def begin(folder: Path) -> None:
    """Mark `folder` as being written; whatever is in it no longer counts as a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    _sync(folder)


def names_in(folder: Path) -> list[str]:
    """The files of a checkpoint that this machine sees."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return sorted(files - {_MARK, MANIFEST})


def finish(folder: Path, written: Collection[str] = ()) -> None:
    """Force all of `folder` to disk, write the manifest (name, size in bytes and SHA-256 of each file), then take the
    mark away.

    Args:
        folder: of the checkpoint.
        written: what the ranks have written there, by `names_in` on each.

    Raises:
        DiskFull: some of it is not to be seen here; the checkpoint keeps its mark.
    """
    deadline = time.monotonic() + PATIENCE
    while missing := sorted(set(written) - set(names_in(folder))):
        if time.monotonic() < deadline:
            time.sleep(0.5)
            continue
        raise DiskFull(
            f"'{folder}' lacks {', '.join(missing[:3])} on {socket.gethostname()}, which other ranks have written: the "
            "folder is not the same one on all machines any more. The checkpoint counts as incomplete."
        )
    # On disk before the manifest says so: after a crash of the machine it must not promise what was in a cache.
    for path in folder.rglob("*"):
        _sync(path)
    names = names_in(folder)
    digests = _digests([folder / name for name in names])
    files = {name: [(folder / name).stat().st_size, digest] for name, digest in zip(names, digests, strict=True)}
    write_whole(folder / MANIFEST, json.dumps({"files": files}, indent=1, sort_keys=True) + "\n")
    mark_whole(folder)


def mark_whole(folder: Path) -> None:
    """Take the mark away: `folder` has been written to its end."""
    (folder / _MARK).unlink(missing_ok=True)
    _sync(folder)


def was_cut_off(folder: Path) -> bool:
    """Whether `begin` has no `finish` or `mark_whole` yet."""
    return (folder / _MARK).exists()


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint was written to its end. Whether its files are still whole, `damage` tells."""
    return (folder / _STATE).is_file() and not was_cut_off(folder)


def damage(folder: Path) -> str:
    """What keeps a complete checkpoint from being resumed, in one line; an empty text where nothing does.

    With a manifest each file must be there in its size and with its SHA-256. Without one it is another trainer's, and
    the files that a resume reads must be there: without them it would start with fresh state, silently. They must be
    whole as well, as far as each of them tells by itself.
    """
    found = []
    if (folder / MANIFEST).is_file():
        try:
            files = dict(json.loads((folder / MANIFEST).read_text())["files"])
        except (ValueError, KeyError, TypeError):
            return f"{MANIFEST} cannot be read"
        for name, (size, _) in sorted(files.items()):
            path = folder / name
            if not path.is_file():
                found.append(f"{name} is missing")
            elif path.stat().st_size != size:
                found.append(f"{name} has {path.stat().st_size} bytes, not {size}")
        # Bytes are read only where names and sizes are right.
        if not found:
            digests = _digests([folder / name for name in files])
            found = [f"{n} has other bytes" for n, digest in zip(files, digests, strict=True) if digest != files[n][1]]
    elif (folder / _STATE).is_file():
        found = [f"{path.relative_to(folder)} cannot be read" for path in sorted(folder.rglob("*")) if is_broken(path)]
    found = found or _lacking({path.name for path in folder.iterdir()})
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def is_broken(path: Path) -> bool:
    """Whether a file is empty, ends early, or is not what its name says; torch's files have a checksum."""
    try:
        if path.name == _STATE:
            return not isinstance(json.loads(path.read_text())["global_step"], int)
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return False
        if path.suffix in (".pt", ".pth", ".bin"):
            with path.open("rb") as file:
                return file.read(1) != _PICKLE and zipfile.ZipFile(file).testzip() is not None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, zipfile.BadZipFile):
        return True
    return False


def _lacking(names: Collection[str]) -> list[str]:
    """What a resume needs, and the entries of a checkpoint folder (`names`) lack."""
    found = [f"{_STATE} is missing"] if _STATE not in names else []
    # DeepSpeed's own folder has model, optimizer and schedule.
    if "latest" in names:
        return found
    needed = {
        "the model's weights": lambda n: any(fnmatch(n, each) for each in (*_WEIGHTS, "pytorch_model_fsdp*")),
        "the optimizer's state (optimizer.pt)": lambda n: n.startswith("optimizer"),
        "scheduler.pt": lambda n: n == "scheduler.pt",
        "rng_state.pth": lambda n: n.startswith("rng_state"),
    }
    return found + [f"{what} is missing" for what, fits in needed.items() if not any(map(fits, names))]


def _digests(paths: list[Path]) -> list[str]:
    """SHA-256 of each file, in hexadecimal digits; files that have not changed are read once in a process."""
    stats = [path.stat() for path in paths]
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(_digest, paths, (s.st_size for s in stats), (s.st_mtime_ns for s in stats)))


@lru_cache(maxsize=4096)
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The folders ``checkpoint-N`` of a run, complete or not, by N."""
    found = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((path for path in found if _is_numbered(path) and path.is_dir()), key=_number)


def newest(output_dir: str | Path) -> Path | None:
    """The newest checkpoint of a run that can be resumed: the whole one with the largest N; where there is none, a
    ``last-checkpoint`` pulled from the Hub. A warning names each one that is damaged and skipped.

    Raises:
        ValueError: there are complete checkpoints, and all of them are damaged.
    """
    damaged = []
    for path in [*reversed(checkpoints(output_dir)), Path(output_dir) / LAST]:
        if was_cut_off(path) or not ((path / _STATE).is_file() or (path / MANIFEST).is_file()):
            continue
        what = damage(path)
        if not what:
            return path
        damaged.append(f"{path.name} ({what})")
        _logger.warning("The checkpoint '%s' is damaged and was skipped: %s.", path, what)
    if damaged:
        raise ValueError(
            f"'{output_dir}' holds checkpoints, but none of them can be resumed: {'; '.join(damaged)}. Restore their "
            "files from a copy, or take another output_dir."
        )
    return None


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
        elif was_cut_off(path):
            shutil.rmtree(path, ignore_errors=True)
    kept = {Path(path).resolve() for path in keep}
    # The newest one always stays, or nothing could be resumed.
    for path in whole[: -max(1, limit)] if limit else []:
        if path.resolve() not in kept:
            # A kill in the middle of the deletion must not leave half a checkpoint that looks whole.
            begin(path)
            shutil.rmtree(path, ignore_errors=True)


def resolve(asked: str | bool | None, output_dir: str | Path, overwrite: bool = False) -> str | None:
    """The checkpoint to resume from.

    Args:
        asked: a folder; ``True`` or ``"true"``, the newest whole checkpoint of `output_dir`; ``"auto"``, the same,
            or None where there is none yet; None, ``False`` or ``"false"``.
        output_dir: the run's folder.
        overwrite: checkpoints of another run may lie there: `make_room` will move them aside.

    Raises:
        ValueError: there is none, or the one that is named was cut off while it was written, or is damaged; or a start
            from the beginning, or from another folder's checkpoint, where complete checkpoints or a trained model lie.
    """
    word = str(asked).lower()
    if word in ("true", "auto") and (found := newest(output_dir)):
        return str(found)
    if word == "true":
        raise ValueError(
            f"resume_from_checkpoint: {asked}, but there is no complete checkpoint in '{output_dir}'. "
            "`auto` starts from the beginning where there is none."
        )
    if not asked or word in ("false", "auto"):
        _refuse_used(output_dir, overwrite)
        return None
    folder = Path(str(asked))
    why = "was cut off while it was written" if was_cut_off(folder) else ""
    why = why or ("" if is_complete(folder) else "is not a checkpoint")
    why = why or (f"is damaged: {broken}" if (broken := damage(folder)) else "")
    if why:
        other = newest(folder.parent)
        hint = f" The newest whole one beside it is '{other}'." if other else ""
        raise ValueError(f"resume_from_checkpoint: '{folder}' {why}.{hint}")
    if folder.resolve().parent != Path(output_dir).resolve():
        _refuse_used(output_dir, overwrite)
    return str(folder)


def _refuse_used(output_dir: str | Path, overwrite: bool) -> None:
    if overwrite:
        return
    way_out = "take another output_dir, or set --overwrite_output_dir true, which moves it into previous-N there."
    if there := [path for path in checkpoints(output_dir) if is_complete(path)]:
        raise ValueError(
            f"'{output_dir}' holds {len(there)} checkpoint(s) of an earlier run, the newest is {there[-1].name}. "
            f"Resume it (--resume_from_checkpoint auto), {way_out}"
        )
    if models := _models(output_dir):
        raise ValueError(f"'{output_dir}' holds a trained model ({models[0].name}) and no checkpoint: {way_out}")


def _models(output_dir: str | Path) -> list[Path]:
    """Weights that lie in a run's folder itself, saved to their end."""
    if was_cut_off(Path(output_dir)):
        return []
    return sorted(path for shape in _WEIGHTS for path in Path(output_dir).glob(shape))


def make_room(output_dir: str | Path, start: str | None) -> Path | None:
    """Move what belongs to earlier runs aside, before a run starts at the checkpoint `start` (None: at the beginning).

    Returns the folder that it was moved to, None if there was nothing.

    Checkpoints after `start` would be taken for newer ones than those that the run will write. Those, and for a start
    from elsewhere all that the earlier run has left, are renamed into ``previous-N`` of `output_dir`. Nothing is
    deleted; only what was cut off stays, for `rotate`.
    """
    output = Path(output_dir)
    within = start is not None and Path(start).resolve().parent == output.resolve()
    # After `last-checkpoint` every numbered one counts as later.
    first = _step_of(Path(str(start))) if within and Path(str(start)).name != LAST else -1
    later = [path for path in checkpoints(output) if _number(path) > first]
    moved = [path for path in later if not was_cut_off(path) and any(path.iterdir())]
    if not moved and (within or not _models(output)):
        return None
    if not within:
        moved += [path for shape in _OF_A_RUN for path in output.glob(shape)]
    place = next(p for n in range(1, 10_000) if not (p := output / f"previous-{n}").exists())
    place.mkdir()
    for path in moved:
        path.rename(place / path.name)
    _sync(output)
    return place


def _step_of(folder: Path) -> int:
    """The step of a checkpoint, which somebody may have given another name."""
    return _number(folder) if _is_numbered(folder) else int(json.loads((folder / _STATE).read_text())["global_step"])


def _is_numbered(folder: Path) -> bool:
    prefix, _, number = folder.name.partition("-")
    return prefix == PREFIX_CHECKPOINT_DIR and number.isdecimal()


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
