"""What is kept on disk: files written whole, locks, versions; offline artefacts, also on the Hub.

An offline artefact is a folder of Parquet files and ``metadata.json``.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

METADATA = "metadata.json"
_LONGEST_LINE = 1 << 26


class MissingArtefact(ValueError):
    """There is none where one was looked for."""


def versions(*packages: str) -> dict[str, str]:
    """The versions of those `packages` that are installed."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a crash leaves either the old content or the new one, on the disk when this returns."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        # The disk may be full: the part would take up what is left.
        part.unlink(missing_ok=True)
        raise
    part.replace(path)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in a file of lines, ``.gz`` or plain; one that was cut off, or is being written, is ignored."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with suppress(FileNotFoundError, gzip.BadGzipFile, EOFError, zlib.error), opened(path, "rb") as file:
        # A bound, because a few bytes may unpack to one endless line.
        while line := file.readline(_LONGEST_LINE):
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


def lock(file: int, *, wait: bool) -> bool:
    """Lock an open file (a descriptor). Returns whether it is ours now; True where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One text for each key on which two settings (JSON values) differ."""
    return [
        f"{key}: {json.dumps(before.get(key))}, now {json.dumps(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


@dataclass(frozen=True)
class Kind:
    """A kind of offline artefact.

    Attributes:
        what: what it is called in messages.
        main_file: the file that marks it.
        format: the newest one that can be read.
        command: that builds one.
    """

    what: str
    main_file: str
    format: int
    command: str

    def check_destination(self, path: Path) -> None:
        """Raise ValueError if an artefact saved at `path` would replace something that is not one of its kind."""
        if path.exists() and not ((path / METADATA).is_file() and (path / self.main_file).is_file()):
            raise ValueError(f"'{path}' exists and is not a {self.what}; it is left alone. Choose another folder.")

    def write(self, path: Path, tables: Mapping[str, pa.Table], metadata: Mapping[str, Any]) -> Path:
        """Write `tables` (file name -> table) and `metadata` as the folder `path`, replacing one that is there.

        All is written beside it first: a crash while writing leaves the old folder as it was.
        """
        self.check_destination(path)
        part = path.with_name(f".{path.name}.part")
        old = path.with_name(f".{path.name}.old")
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir(parents=True)
        for name, table in tables.items():
            pq.write_table(table, part / name)
        metadata = {"format": self.format, **metadata}
        (part / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
        if path.exists():
            path.rename(old)
        part.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        return path

    def open(self, path_or_hub_id: str | Path, revision: str | None = None) -> tuple[Path, dict[str, Any]]:
        """The folder, local or from a dataset repository on the Hub (``owner/name``), and its metadata.

        Raises:
            MissingArtefact: neither a folder nor a repository that can be read.
            ValueError: it is of another kind, or of a newer format.
        """
        folder = Path(path_or_hub_id)
        if not folder.is_dir():
            folder = self._download(str(path_or_hub_id), revision)
        for name in (METADATA, self.main_file):
            if not (folder / name).is_file():
                raise ValueError(f"'{folder}' is not a {self.what}: it has no {name}.")
        with self.naming_damage(folder):
            metadata: dict[str, Any] = json.loads((folder / METADATA).read_text())
            version = int(metadata["format"])
        if version > self.format:
            raise ValueError(f"'{folder}' was written by a newer basis-rl (format {version}). Upgrade it.")
        return folder, metadata

    @contextmanager
    def naming_damage(self, source: str | Path) -> Iterator[None]:
        """Within it the files of `source` are read, which may hold anything; what that raises is a ValueError."""
        try:
            yield
        except Exception as error:
            # The messages of pyarrow have many lines.
            said = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
            raise ValueError(
                f"The {self.what} '{source}' is damaged: {said.rstrip('.')}. Build it again with `{self.command}`."
            ) from error

    def push(
        self, save: Callable[[Path], Path], repo_id: str, *, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload what `save` writes as a dataset repository and return its address."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        url = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = save(Path(temporary) / "artefact")
            message = self.what[0].upper() + self.what[1:]
            api.upload_folder(repo_id=repo_id, folder_path=folder, repo_type="dataset", commit_message=message)
        return str(url)

    def _download(self, repo_id: str, revision: str | None) -> Path:
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(repo_id, repo_type="dataset", revision=revision))
        except Exception as error:
            raise MissingArtefact(
                f"There is no {self.what} at '{repo_id}': not a folder, and not a dataset repository on the Hub that "
                f"could be read ({type(error).__name__}). Build it with `{self.command}`."
            ) from error
