"""What the build of a value table has finished so far, in append-only files that survive a kill."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from basis_rl.run.artefacts import differences, lock, read_lines

_PATTERN = "shard-*.jsonl"
_SYNC_SECONDS = 1.0


@dataclass(frozen=True)
class Record:
    """The finished rollouts of one prompt.

    Attributes:
        prompt_id: of the prompt.
        part: 0 for the rollouts up to an early exit, 1 for those after it.
        rewards: one for each rollout, NaN where it could not be scored.
        tokens: of all completions together.
        truncated: completions that were cut off.
    """

    prompt_id: str
    part: int
    rewards: list[float]
    tokens: int
    truncated: int

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt_id, self.part

    def line(self) -> dict[str, Any]:
        """The record as it is written to the file."""
        return {**asdict(self), "rewards": [None if math.isnan(reward) else reward for reward in self.rewards]}


def begun(folder: Path) -> dict[str, Any]:
    """The identity of the build whose results are in `folder`, as one of its processes wrote it; empty without any."""
    lines = (line for path in sorted(folder.glob(_PATTERN)) for line in read_lines(path))
    return next((line["identity"] for line in lines if "identity" in line), {})


class Shards:
    """The folder of a build that is under way: a file of JSON lines for each of its processes.

    The first line of each file is the identity of the build, each other one a `Record`. A line that a kill cut off is
    not JSON and is ignored; its prompt is sampled again.

    Args:
        folder: is made when the first record is written.
        identity: all that decides about the rewards; JSON values.

    Raises:
        ValueError: the folder holds the results of another build; says where they differ.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        for path in sorted(folder.glob(_PATTERN)):
            known = next((line["identity"] for line in read_lines(path) if "identity" in line), self.identity)
            if differing := differences(known, self.identity):
                found = f"'{folder}' holds the results of a build that was begun otherwise:"
                way_out = "Set these back to resume it, or delete the folder to start again."
                raise ValueError("\n  ".join([found, *differing]) + f"\n{way_out}")

    def records(self) -> Iterator[Record]:
        """All that is finished, of all processes; each key once."""
        seen: set[tuple[str, int]] = set()
        for path in sorted(self.folder.glob(_PATTERN)):
            for line in read_lines(path):
                if "prompt_id" not in line:
                    continue
                rewards = [math.nan if reward is None else reward for reward in line.pop("rewards")]
                record = Record(**line, rewards=rewards)
                # A prompt may have been finished twice, by processes with other numbers of parts.
                if record.key not in seen:
                    seen.add(record.key)
                    yield record

    @contextmanager
    def writer(self, shard: int = 0, of: int = 1) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """A function that appends a line to the file of one process.

        The line is in the file when the function returns, and on the disk about a second later.

        Raises:
            ValueError: another process has it open.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"shard-{shard:05d}-of-{of:05d}.jsonl"
        with path.open("a") as file:
            if not lock(file.fileno(), wait=False):
                way_out = "Wait for it, or give each its own part: --values_shard 0/2, 1/2."
                raise ValueError(f"Another process is writing '{path}'. {way_out}")
            # If a kill has cut the last line off, end it, so that the next one starts on a line of its own.
            if path.read_bytes()[-1:] not in (b"", b"\n"):
                file.write("\n")
            synced = time.monotonic()

            def write(line: Mapping[str, Any]) -> None:
                nonlocal synced
                print(json.dumps(line), file=file, flush=True)
                # At most once a second: on a network disk a sync can take longer than a rollout.
                if time.monotonic() - synced > _SYNC_SECONDS:
                    os.fsync(file.fileno())
                    synced = time.monotonic()

            if not any("identity" in line for line in read_lines(path)):
                write({"identity": self.identity})
            try:
                yield write
            finally:
                os.fsync(file.fileno())

    @contextmanager
    def merging(self) -> Iterator[bool]:
        """Within it, no other process merges the same build; False if another one has already merged it."""
        try:
            file = (self.folder / "merge.lock").open("w")
        except FileNotFoundError:
            yield False
            return
        with file:
            lock(file.fileno(), wait=True)
            yield any(self.folder.glob(_PATTERN))

    def remove(self) -> None:
        """Delete the folder: the table is saved."""
        shutil.rmtree(self.folder, ignore_errors=True)
