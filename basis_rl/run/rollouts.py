"""Rollouts that a run keeps, to be looked at: ``rollouts/step-000012.jsonl.gz`` in its folder, one file per step."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from basis_rl.run.artefacts import read_lines
from basis_rl.run.redact import redact

FOLDER = "rollouts"
_NAME = re.compile(r"step-(\d+)\.jsonl\.gz")
# What a row must have, and of which types, to be shown.
_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "tokens": (int,),
    "prompt_id": (str,),
    "prompt": (str,),
    "completion": (str,),
    "cut_off": (bool,),
    "rewards": (dict,),
    "extra": (dict,),
    **dict.fromkeys(("reward", "baseline", "advantage", "chance"), (int, float, type(None))),
}
_logger = logging.getLogger(__name__)
Row = dict[str, Any]


class KeptRollouts:
    """Collects the rollouts of the current step, and writes them as one file at its end, without secrets.

    Args:
        output_dir: of the run.
        megabytes: of all files together, at most: the oldest are deleted. 0: none is written.
    """

    def __init__(self, output_dir: str | Path, megabytes: float) -> None:
        self.folder = Path(output_dir) / FOLDER
        self.most = int(megabytes * 1e6)
        self._rows: list[Row] = []
        self._sizes: dict[Path, int] = {}

    def begin(self, step: int) -> None:
        """Delete what an earlier run in the same folder has kept after `step`: all of it, unless this one resumes."""
        self._rows = []
        self._sizes = {}
        for part in self.folder.glob(".step-*.part"):
            part.unlink()
        for number, path in files(self.folder.parent).items():
            if number > step:
                path.unlink()
            else:
                self._sizes[path] = path.stat().st_size

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rollouts of the current step."""
        self._rows += map(dict, rows)

    def write(self, step: int) -> None:
        """Write the rollouts of the step that has ended, whole or not at all. If that fails, no more is kept.

        Not forced to the disk: it would cost more than everything else, and what a power failure breaks is skipped.
        """
        rows = self._rows
        self._rows = []
        if not rows or not self.most:
            return
        known: dict[str, str] = {}
        content = gzip.compress("".join(_line(step, row, known) for row in rows).encode(), compresslevel=5)
        path = self.folder / f"step-{step:06d}.jsonl.gz"
        part = path.with_name(f".{path.name}.part")
        try:
            while self._sizes and sum(self._sizes.values()) + len(content) > self.most:
                oldest = next(iter(self._sizes))
                oldest.unlink(missing_ok=True)
                del self._sizes[oldest]
            if len(content) <= self.most:
                self.folder.mkdir(exist_ok=True)
                part.write_bytes(content)
                part.replace(path)
                self._sizes[path] = len(content)
        except OSError as error:
            self.most = 0
            _logger.warning("The rollouts could not be written, and no more of them are kept: %s.", error)


def _line(step: int, row: Row, known: dict[str, str]) -> str:
    """A row as it is written; `known` has the texts of the batch that were redacted already."""

    def public(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        # A batch repeats each prompt, and redacting a text costs more than looking it up.
        if str(value) not in known:
            known[str(value)] = redact(str(value))
        return known[str(value)]

    shown = {key: value if isinstance(value, Mapping) else public(value) for key, value in row.items()}
    shown["extra"] = {str(name): public(value) for name, value in row["extra"].items()}
    # In ASCII, since a model may say what no encoding takes.
    return json.dumps({"step": step, **shown}) + "\n"


def files(output_dir: str | Path) -> dict[int, Path]:
    """The files of a run, by step, the oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in Path(output_dir, FOLDER).glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def read(paths: Sequence[Path]) -> Iterator[Row]:
    """The rollouts in files; what is damaged, or has another form, is skipped."""
    for path in paths:
        for row in read_lines(path):
            if all(isinstance(row.get(key), types) for key, types in _TYPES.items()):
                yield row
