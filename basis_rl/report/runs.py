"""Reads the folders of runs, and groups the runs that differ only in the seed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from basis_rl.report.curves import read_log
from basis_rl.run.artefacts import read_lines

# Share of rollouts whose advantage is not exactly 0, that is of those that contribute to the gradient.
EFFECTIVE = "advantages/effective"
_METRICS, _RECIPE, _RECORD = "metrics.jsonl", "recipe.yaml", "run.json"
_FACTS = ("baseline", "objective", "seed")
# Where a run writes, how it is started and monitored: keys that do not change what it learns.
_BESIDE = {
    "env",
    "output_dir",
    "overwrite_output_dir",
    "run_name",
    "project",
    "seed",
    "data_seed",
    "resume_from_checkpoint",
    "report_to",
    "log_completions",
    "num_generations_eval",
    "per_device_eval_batch_size",
    "num_completions_to_print",
    "disable_tqdm",
    "push_to_hub",
    "serve",
    "serve_devices",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_group_port",
}
_BESIDE_PREFIXES = ("save_", "hub_", "trackio_", "values_", "clusters_", "logging_", "eval_")
# These keys come first in a label, under these names.
_SHORT = {"baseline": "", "objective": "", "num_generations": "G", "learning_rate": "lr"}


@dataclass(frozen=True)
class Run:
    """One run's folder.

    Attributes:
        path: the folder.
        rows: its log, one row per step, in increasing order of steps.
        recipe: its ``recipe.yaml``, nested keys flattened as in ``baseline_kwargs.values``; empty if there is none.
        record: its ``run.json`` (`basis_rl.report.card.RunFacts`); empty if there is none.
        benchmarks: accuracy of its final model (``results.json`` of ``basis-rl eval``), by benchmark and ``avg@n``.
    """

    path: Path
    rows: list[dict[str, Any]]
    recipe: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    benchmarks: dict[str, float] = field(default_factory=dict)

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    @property
    def finished(self) -> bool:
        return bool(self.record.get("finished", any("train_runtime" in row for row in self.rows)))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recipe's settings, and the recorded ones that are compared even if the recipe leaves them at defaults."""
        known = {key: self.record[key] for key in _FACTS if key in self.record} | self.record.get("compared", {})
        return known | {key: value for key, value in self.recipe.items() if value is not None}

    def spent(self, what: str, rollouts: float) -> float:
        """The value of a cumulative count (``seconds``, ``num_rollout_tokens``, ``step``) after `rollouts` rollouts.

        Interpolated linearly between the rows, starting with 0 at 0 rollouts; NaN if it was not logged.
        """
        found: dict[float, float] = {0.0: 0.0}
        for row in self.rows:
            if isinstance(row.get(what), int | float):
                found[float(row["num_rollouts"])] = float(row[what])
        if len(found) == 1:
            return math.nan
        return float(np.interp(rollouts, list(found), list(found.values())))

    @property
    def table(self) -> dict[str, Any] | None:
        """The run's value table: ``source``, ``sha256`` and ``rollouts`` (how many it took); None if there is none."""
        return next((each for each in self.record.get("artefacts", ()) if each["kind"] == "value table"), None)

    @property
    def rollouts(self) -> float:
        """Number of rollouts sampled up to the last row."""
        return float(self.rows[-1]["num_rollouts"])

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """``(x, y)``: the finite values of a metric and the rollouts after which they were logged, x increasing.

        Several values at the same x (several updates on one batch) are averaged.
        """
        places: dict[float, list[float]] = {}
        for row in self.rows:
            value = row.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                places.setdefault(float(row["num_rollouts"]), []).append(float(value))
        xs = sorted(places)
        return np.array(xs), np.array([np.mean(places[x]) for x in xs])


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed, with a label and the settings that they share."""

    label: str
    runs: list[Run]
    settings: dict[str, Any]


def find_runs(folders: Sequence[str | Path]) -> list[Path]:
    """The folders of runs among `folders` and directly below them, each once, in the given order.

    Raises:
        ValueError: one of them does not exist, or neither is a run nor contains one.
    """
    found: dict[Path, Path] = {}
    for name in folders:
        folder = Path(name)
        if not folder.is_dir():
            raise ValueError(f"There is no folder '{folder}'.")
        inside = [folder] if _is_run(folder) else sorted(path for path in folder.iterdir() if _is_run(path))
        if not inside:
            raise ValueError(
                f"'{folder}' is not a run and contains none: neither it nor a folder directly below it has a "
                f"{_METRICS}. Name the output_dir of `basis-rl train`, or the folder of `basis-rl sweep`."
            )
        found.update({path.resolve(): path for path in inside})
    return list(found.values())


def _is_run(folder: Path) -> bool:
    return (folder / _METRICS).is_file() or (folder / "trainer_state.json").is_file()


def read_run(folder: Path) -> Run:
    """Read the run in `folder`. It may still be in progress, or have been killed and resumed.

    Raises:
        ValueError: no reward is logged yet, or the log has no number of rollouts.
    """
    logged = read_lines(folder / _METRICS) if (folder / _METRICS).is_file() else read_log(folder)
    rows = merge_rows([row for row in logged if isinstance(row.get("step"), int)])
    if not any(row.get("reward") is not None for row in rows):
        raise ValueError(f"'{folder}' has not logged a reward yet.")
    rows = [row for row in rows if row.get("num_rollouts") is not None]
    if not rows:
        raise ValueError(
            f"The log of '{folder}' has no `num_rollouts`; another trainer or an older basis-rl wrote it. Without it, "
            "the run cannot be compared at the same number of rollouts. Train it again."
        )
    for row in rows:
        if row.get("advantages/zero") is not None:
            row[EFFECTIVE] = 1.0 - row["advantages/zero"]
    recipe = yaml.safe_load((folder / _RECIPE).read_text()) if (folder / _RECIPE).is_file() else {}
    record = json.loads((folder / _RECORD).read_text()) if (folder / _RECORD).is_file() else {}
    return Run(folder, rows, flatten(recipe or {}), record, _benchmarks(folder))


def _benchmarks(folder: Path) -> dict[str, float]:
    """Accuracies from ``results.json`` in the folder or in its ``eval`` folder; entries of another form are ignored."""
    found = {}
    for path in (folder / "results.json", folder / "eval" / "results.json"):
        content = json.loads(path.read_text()) if path.is_file() else {}
        for name, entry in content.items() if isinstance(content, dict) else ():
            if isinstance(entry, dict) and "num_rollouts" in entry:
                metric = f"avg@{entry['num_rollouts']}"
                if isinstance(entry.get(metric), dict):
                    found[f"{name} {metric}"] = float(entry[metric]["value"])
    return found


def merge_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per step. If a run was resumed and logged steps again, the later rows replace the earlier ones.

    A row with a smaller step than the previous row starts such a repetition: all earlier rows from its step on are
    dropped. Successive rows of the same step (training, evaluation, end of the run) are merged into one.
    """
    merged: list[dict[str, Any]] = []
    for row in rows:
        if merged and row["step"] < merged[-1]["step"]:
            while merged and merged[-1]["step"] >= row["step"]:
                merged.pop()
        if merged and merged[-1]["step"] == row["step"]:
            merged[-1].update(row)
        else:
            merged.append(dict(row))
    return merged


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def what_counts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that change what a run learns, except for the seed."""
    return {
        key: value
        for key, value in settings.items()
        if key.split(".")[0] not in _BESIDE and not key.startswith(_BESIDE_PREFIXES)
    }


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group the runs that have the same settings except for the seed, in the order of their first member.

    A group's label lists the baseline and those settings that are needed to tell the groups apart. A run without a
    recipe forms a group of its own, with its folder's name as label.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        known = what_counts(run.settings)
        identity = json.dumps(known, sort_keys=True, default=str) if known else str(run.path)
        members.setdefault(identity, []).append(run)
    groups = list(members.values())
    labels = _labels([what_counts(group[0].settings) for group in groups], [group[0].path.name for group in groups])
    return [Group(label, group, what_counts(group[0].settings)) for label, group in zip(labels, groups, strict=True)]


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose value is not the same everywhere: first those that have a place in labels, then the others by name."""
    keys = {key for known in settings for key in known}
    differ = [key for key in keys if len({json.dumps(known.get(key), default=str) for known in settings}) > 1]
    order = list(_SHORT)
    return sorted(differ, key=lambda key: (order.index(key) if key in order else len(order), key))


def _labels(settings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    parts: list[list[str]] = [[] for _ in settings]
    for key in ["baseline", *(key for key in differing(settings) if key != "baseline")]:
        so_far = [" ".join(part) for part in parts]
        for i, known in enumerate(settings):
            alike = [other for j, other in enumerate(settings) if so_far[j] == so_far[i]]
            if key == "baseline" or len({json.dumps(other.get(key), default=str) for other in alike}) > 1:
                parts[i] += _part(key, known.get(key))
    labels = [" ".join(part) or name for part, name in zip(parts, names, strict=True)]
    return [
        label if labels.count(label) == 1 else f"{label} ({name})" for label, name in zip(labels, names, strict=True)
    ]


def _part(key: str, value: Any) -> list[str]:
    if value is None:
        return []
    name = _SHORT.get(key, key.rpartition(".")[2])
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return [f"{name}={shown}" if name else shown]
