"""Reads the folders of runs, and groups the runs that differ only in the seed."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from transformers.utils.generic import flatten_dict

from basis_rl.run.artefacts import merge_rows, read_lines
from basis_rl.run.checkpoint import checkpoints
from basis_rl.run.record import RESULTS, RUN_FILE

# Share of rollouts whose advantage is not exactly 0, that is of those that contribute to the gradient.
EFFECTIVE = "advantages/effective"
_METRICS, _STATE, _RECIPE = "metrics.jsonl", "trainer_state.json", "recipe.yaml"
# Keys that do not change what a run learns: where it writes, how it is started and monitored, its seed.
_BESIDE = re.compile(
    r"(env|output_dir|overwrite_output_dir|run_name|project|seed|data_seed|resume_from_checkpoint|report_to"
    r"|disable_tqdm|log_completions|num_completions_to_print|num_generations_eval|per_device_eval_batch_size"
    r"|push_to_hub|serve|serve_devices|vllm_server_(base_url|host|port)|vllm_group_port)(\..*)?"
    r"|(save|hub|trackio|values|clusters|logging|eval)_.*"
)
# These keys come first in a label, under these names.
_SHORT = {"baseline": "", "objective": "", "num_generations": "G", "learning_rate": "lr"}


@dataclass(frozen=True)
class Run:
    """A run's folder.

    `rows` is its log, one row per step; `recipe` its ``recipe.yaml``, flattened; `info` its ``run.json``; `benchmarks`
    the accuracies of its final model (``results.json`` of ``basis-rl eval``), by benchmark and ``avg@n``.
    """

    path: Path
    rows: list[dict[str, Any]]
    recipe: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    benchmarks: dict[str, float] = field(default_factory=dict)

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    @property
    def finished(self) -> bool:
        return bool(self.info.get("finished", any("train_runtime" in row for row in self.rows)))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recipe's settings, and the recorded ones that are compared even if the recipe leaves them at defaults."""
        known = {key: self.info[key] for key in ("baseline", "objective", "seed") if key in self.info}
        known |= self.info.get("compared", {})
        return known | {key: value for key, value in self.recipe.items() if value is not None}

    def spent(self, what: str, rollouts: Any) -> Any:
        """A cumulative count (``seconds``, ``num_rollout_tokens``, ``step``) after `rollouts`, a number or an array.

        It is interpolated linearly between the rows, starting with 0, and NaN if it was not logged.
        """
        found = {row["num_rollouts"]: row[what] for row in self.rows if isinstance(row.get(what), int | float)}
        if not found:
            return rollouts * math.nan
        return np.interp(rollouts, [0, *found], [0, *found.values()])

    def benchmark(self, name: str) -> float:
        return self.benchmarks.get(name, math.nan)

    @property
    def table(self) -> dict[str, Any] | None:
        """The run's value table: ``source``, ``sha256`` and ``rollouts`` (how many it took); None if there is none."""
        return next((each for each in self.info.get("artefacts", ()) if each["kind"] == "value table"), None)

    @property
    def rollouts(self) -> float:
        """Number of rollouts sampled up to the last row."""
        return float(self.rows[-1]["num_rollouts"])

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """``(x, y)``: the finite values of a metric and the rollouts after which they were logged, x increasing.

        Several values at the same x (several updates on one batch) are averaged.
        """
        logged = [(row["num_rollouts"], row.get(key)) for row in self.rows]
        found = [(x, y) for x, y in logged if isinstance(y, int | float) and math.isfinite(y)]
        places, values = np.array(found, dtype=float).reshape(-1, 2).T
        x, index = np.unique(places, return_inverse=True)
        return x, np.bincount(index, weights=values) / np.bincount(index)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed, with a label and the settings that they share."""

    label: str
    runs: list[Run]
    settings: dict[str, Any]


def find_runs(folders: Sequence[str | Path]) -> list[Path]:
    """The folders of runs among `folders` and directly below them, each once; a ValueError where there is none."""
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
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
    return (folder / _METRICS).is_file() or (folder / _STATE).is_file()


def read_run(folder: Path) -> Run:
    """Read a run, which may be in progress; a ValueError if it has not logged rewards and numbers of rollouts."""
    logged = read_lines(folder / _METRICS) if (folder / _METRICS).is_file() else read_log(folder)
    rows = merge_rows([row for row in logged if isinstance(row.get("step"), int)])
    if not any(row.get("reward") is not None for row in rows):
        raise ValueError(f"'{folder}' has not logged a reward yet.")
    rows = [row for row in rows if row.get("num_rollouts") is not None]
    if not rows:
        raise ValueError(
            f"The log of '{folder}' has no `num_rollouts`, so the run cannot be compared: another trainer or an older "
            "basis-rl wrote it. Train it again."
        )
    for row in rows:
        if row.get("advantages/zero") is not None:
            row[EFFECTIVE] = 1.0 - row["advantages/zero"]
    recipe = yaml.safe_load((folder / _RECIPE).read_text()) if (folder / _RECIPE).is_file() else {}
    info = json.loads((folder / RUN_FILE).read_text()) if (folder / RUN_FILE).is_file() else {}
    return Run(folder, rows, flatten_dict(recipe or {}), info, _benchmarks(folder))


def _benchmarks(folder: Path) -> dict[str, float]:
    """Accuracies from ``results.json`` in the folder or in its ``eval`` folder; entries of another form are ignored."""
    found = {}
    for path in (folder / RESULTS, folder / "eval" / RESULTS):
        content = json.loads(path.read_text()) if path.is_file() else {}
        for name, entry in content.items() if isinstance(content, dict) else ():
            with suppress(KeyError, TypeError):
                metric = f"avg@{entry['num_rollouts']}"
                found[f"{name} {metric}"] = float(entry[metric]["value"])
    return found


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The log in ``trainer_state.json`` of a run's folder or of its newest checkpoint; a ValueError without one."""
    for place in [Path(folder), *reversed(checkpoints(folder))]:
        if (place / _STATE).is_file():
            log: list[dict[str, Any]] = json.loads((place / _STATE).read_text())["log_history"]
            return log
    raise ValueError(f"'{folder}' has no {_STATE}. Name the output_dir of a run that has saved a checkpoint.")


def what_counts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, flattened, that change what a run learns, except for the seed."""
    return {key: value for key, value in settings.items() if value != {} and not _BESIDE.fullmatch(key)}


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group the runs that have the same settings except for the seed; a run without any is a group of its own.

    A label lists the baseline and those settings that tell the groups apart; without settings it is the folder's name.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        known = what_counts(run.settings)
        identity = json.dumps(known, sort_keys=True, default=str) if known else str(run.path)
        members.setdefault(identity, []).append(run)
    settings = [what_counts(group[0].settings) for group in members.values()]
    labels = _labels(settings, [group[0].path.name for group in members.values()])
    return [Group(*each) for each in zip(labels, members.values(), settings, strict=True)]


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose value is not the same everywhere: first those that have a place in labels, then the others by name."""
    keys = {key for known in settings for key in known}
    differ = [key for key in keys if len({json.dumps(known.get(key), default=str) for known in settings}) > 1]
    order = list(_SHORT)
    return sorted(differ, key=lambda key: (order.index(key) if key in order else len(order), key))


def _labels(settings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    labels = [""] * len(settings)
    for key in dict.fromkeys(["baseline", *differing(settings)]):
        longer = [f"{old} {_part(key, known.get(key))}".strip() for old, known in zip(labels, settings, strict=True)]
        # A setting is added only where groups with the same label so far differ in it.
        variants = Counter(old for old, _ in set(zip(labels, longer, strict=True)))
        labels = [
            new if key == "baseline" or variants[old] > 1 else old for old, new in zip(labels, longer, strict=True)
        ]
    labels = [label or name for label, name in zip(labels, names, strict=True)]
    uses = Counter(labels)
    return [label if uses[label] == 1 else f"{label} ({name})" for label, name in zip(labels, names, strict=True)]


def _part(key: str, value: Any) -> str:
    name = _SHORT.get(key, key.rpartition(".")[2])
    shown = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{name}={shown}" if name and shown else shown
