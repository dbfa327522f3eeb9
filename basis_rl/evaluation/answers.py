"""Every answer of an evaluation, on disk: one JSON line each, written problem by problem, so that nothing is lost."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Answer:
    """One completion and its grade.

    Args:
        prompt_id: of the problem.
        sample: 0..n-1.
        level: of the problem, None where it has none.
        prompt: as the model was given it.
        completion: its text.
        answer: content of its last box, None without one.
        gold: what it was compared with.
        reward: 1.0 or 0.0; None if it could not be scored, which counts as wrong.
        truncated: cut off before its end.
        tokens: of the completion, the end token included.
    """

    prompt_id: str
    sample: int
    level: str | None
    prompt: str
    completion: str
    answer: str | None
    gold: str
    reward: float | None
    truncated: bool
    tokens: int


class AnswerFile:
    """The answers of one benchmark, ``FOLDER/NAME.jsonl``, and beside it the settings that they were drawn with.

    Whoever opens it again with the same settings goes on where it ended: problems that have all their samples are kept.

    Args:
        folder: of the evaluation.
        name: of the benchmark.
        settings: all that the answers depend on.

    Raises:
        ValueError: there are answers that were drawn with other settings.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self.path, self.settings_path = folder / f"{name}.jsonl", folder / f"{name}.settings.json"
        self.settings = dict(settings)
        if self.path.is_file() and self.settings_path.is_file():
            before = json.loads(self.settings_path.read_text())
            differing = differences(before, self.settings)
            if differing:
                raise ValueError(
                    f"'{self.path}' holds answers that were drawn with other settings: {'; '.join(differing)}. Choose "
                    "another --output, or remove them."
                )

    def resume(self, ids: Sequence[str], num_samples: int) -> dict[str, list[Answer]]:
        """The problems of `ids` that have all their samples; whatever else is in the file is removed from it."""
        kept = {i: rows for i, rows in self.read().items() if i in set(ids) and len(rows) == num_samples}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text("".join(_line(row) for rows in kept.values() for row in rows))
        _replace(self.settings_path, json.dumps(self.settings, indent=2) + "\n")
        part.replace(self.path)
        return kept

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other process evaluates into the same file.

        Raises:
            ValueError: one does.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"Another process is writing '{self.path}'. Wait for it, or choose another --output."
                ) from None
            except OSError:
                pass  # a file system without locks
            yield

    def append(self, answers: Sequence[Answer]) -> None:
        """Write the answers to one problem and see them on disk."""
        with self.path.open("a") as file:
            file.write("".join(map(_line, answers)))
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[str, list[Answer]]:
        """All answers, by problem, in the order of their samples."""
        return read_answers(self.path)


def read_answers(path: Path) -> dict[str, list[Answer]]:
    """The answers in a file, by problem; a last line that was not written to its end is passed over."""
    found: dict[str, list[Answer]] = {}
    for line in path.read_text().split("\n") if path.is_file() else ():
        try:
            row = Answer(**json.loads(line)) if line else None
        except (json.JSONDecodeError, TypeError):
            continue
        if row is not None and row.sample not in {kept.sample for kept in found.get(row.prompt_id, ())}:
            found.setdefault(row.prompt_id, []).append(row)
    return {i: sorted(rows, key=lambda row: row.sample) for i, rows in found.items()}


def counts(answers: Mapping[str, Sequence[Answer]]) -> tuple[Tensor, Tensor]:
    """Samples and right samples of each problem. Twice ``(P,)`` int64."""
    n = [len(rows) for rows in answers.values()]
    right = [sum(row.reward == 1.0 for row in rows) for rows in answers.values()]
    return torch.tensor(n, dtype=torch.int64), torch.tensor(right, dtype=torch.int64)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One text for each key on which two settings differ."""
    return [
        f"{key}: {json.dumps(before.get(key))}, now {json.dumps(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def _line(row: Answer) -> str:
    return json.dumps(asdict(row)) + "\n"  # in ASCII: a model may say what no encoding takes


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
