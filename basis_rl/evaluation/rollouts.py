"""Every rollout of an evaluation, on disk: one JSON line each, written problem by problem, so that nothing is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from basis_rl.run.artefacts import differences, lock, read_lines, write_whole


@dataclass(frozen=True)
class GradedRollout:
    """One completion and its grade.

    Args:
        prompt_id: of the problem.
        rollout: 0..n-1.
        level: of the problem, None where it has none.
        prompt: as the model was given it.
        completion: its text.
        answer: what is graded of it, such as the content of its last box; None without one.
        gold: what it was compared with.
        reward: 1.0 or 0.0; None if it could not be scored, which counts as wrong.
        truncated: cut off before its end.
        tokens: of the completion, the end token included.
        plain: what Math-Verify alone gives it (`MathVerifyReward.plain`); None as in `reward`, or where nobody asked.
        verdict: what the reward function passes to ``log_extra`` by this name, such as why an answer is wrong.
    """

    prompt_id: str
    rollout: int
    level: str | None
    prompt: str
    completion: str
    answer: str | None
    gold: str
    reward: float | None
    truncated: bool
    tokens: int
    plain: float | None = None
    verdict: str | None = None

    def line(self) -> str:
        """As it is written: in ASCII, since a model may say what no encoding takes."""
        return json.dumps(asdict(self)) + "\n"


class RolloutFile:
    """The rollouts of one benchmark, ``FOLDER/NAME.jsonl``, and beside it the settings that they were drawn with.

    Opening it again with the same settings resumes it: problems that have all their rollouts are kept.

    Args:
        folder: of the evaluation.
        name: of the benchmark.
        settings: all that the rollouts depend on.

    Raises:
        ValueError: there are rollouts that were drawn with other settings.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self.path = folder / f"{name}.jsonl"
        self.settings_path = folder / f"{name}.settings.json"
        self.settings = settings
        there = self.path.is_file() and self.settings_path.is_file()
        if there and (differing := differences(json.loads(self.settings_path.read_text()), self.settings)):
            raise ValueError(
                f"'{self.path}' holds rollouts that were drawn with other settings: {'; '.join(differing)}. Choose "
                "another --output_dir, or remove them."
            )

    def resume(self, ids: Sequence[str], num_rollouts: int) -> dict[str, list[GradedRollout]]:
        """The problems of `ids` that have all their rollouts; whatever else is in the file is removed from it."""
        kept = {i: rows for i, rows in self.read().items() if i in set(ids) and len(rows) == num_rollouts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.settings_path, json.dumps(self.settings, indent=2) + "\n")
        write_whole(self.path, "".join(row.line() for rows in kept.values() for row in rows))
        return kept

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other process evaluates into the same file.

        Raises:
            ValueError: one does.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as file:
            if not lock(file.fileno(), wait=False):
                raise ValueError(f"Another process is writing '{self.path}'. Wait, or choose another --output_dir.")
            yield

    def append(self, rollouts: Sequence[GradedRollout]) -> None:
        """Append the rollouts of one problem; they are on the disk when this returns."""
        with self.path.open("a") as file:
            file.write("".join(row.line() for row in rollouts))
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[str, list[GradedRollout]]:
        """All rollouts, by problem, in their order."""
        return read_rollouts(self.path)


def read_rollouts(path: Path) -> dict[str, list[GradedRollout]]:
    """The rollouts in a file, by problem; an incomplete last line is ignored."""
    found: dict[str, dict[int, GradedRollout]] = {}
    for line in read_lines(path):
        row = GradedRollout(**line)
        found.setdefault(row.prompt_id, {}).setdefault(row.rollout, row)
    return {i: [rows[k] for k in sorted(rows)] for i, rows in found.items()}
