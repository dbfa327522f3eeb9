"""Reads the folders of runs, and groups the runs that differ only in the seed."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from transformers.utils.generic import flatten_dict

from basis_rl.run.artefacts import read_lines
from basis_rl.run.progress import LOG
from basis_rl.run.record import HOUSEKEEPING, RUN_FILE

# The largest number that is taken from a log.
_LARGEST = 1e300
# Of a recipe or record: YAML may say in a few lines what fills the memory.
_MOST_BYTES = 1 << 20
_MOST_VALUES = 100_000
# Keys that do not change what a run learns: also how it is started and monitored, and its seed.
_BESIDE = re.compile(
    rf"({'|'.join(HOUSEKEEPING)}|env|project|seed|data_seed|log_completions|num_completions_to_print"
    r"|num_generations_eval|per_device_eval_batch_size|serve|serve_devices"
    r"|values|clusters)(\..*)?|(save|hub|trackio|values|clusters|logging|eval)_.*"
)
# Of a record: what a run from Python was given besides its settings.
_PARTS = ("base_model", "reward", "baseline_parameters", "sampler", "sampler_parameters")
# These keys come first in a label, under these names.
_SHORT = {"baseline": "", "objective": "", "num_generations": "G", "learning_rate": "lr"}


@dataclass(frozen=True, eq=False)
class Run:
    """A run's folder.

    `log` has the numbers that it logged, one row per step; `info` is its ``run.json``; `recipe` its ``recipe.yaml``,
    flattened, or what `info` tells of the settings of a run from Python.
    """

    path: Path
    log: pd.DataFrame
    recipe: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    @property
    def finished(self) -> bool:
        ended = "train_runtime" in self.log and self.log["train_runtime"].notna().iloc[-1]
        return bool(self.info.get("finished", ended))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recipe's settings, and the recorded ones that are compared even if the recipe leaves them at defaults."""
        known = {key: self.info[key] for key in ("baseline", "objective", "seed") if key in self.info}
        known |= self.info.get("compared", {})
        return known | {key: value for key, value in self.recipe.items() if value not in (None, {})}

    def spent(self, what: str, rollouts: Any) -> Any:
        """A cumulative count (``seconds``, ``num_rollout_tokens``, ``step``) after `rollouts`, a number or an array.

        It is interpolated linearly between the rows, starting with 0, and NaN if it was not logged.
        """
        if what not in self.log:
            return rollouts * math.nan
        counted = self.log.groupby("num_rollouts")[what].last().dropna()
        return np.interp(rollouts, [0, *counted.index], [0, *counted])

    @property
    def table(self) -> dict[str, Any] | None:
        """The run's value table: ``source``, ``sha256`` and ``rollouts`` (how many it took); None if there is none."""
        return next((each for each in self.info.get("artefacts", ()) if each["kind"] == "value table"), None)

    @property
    def rollouts(self) -> float:
        """Number of rollouts sampled up to the last row."""
        return float(self.log["num_rollouts"].iloc[-1])

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """``(x, y)``: the values of a metric and the rollouts after which they were logged, x increasing.

        Several values at the same x (several updates on one batch) are averaged.
        """
        if key not in self.log:
            return np.empty(0), np.empty(0)
        values = self.log.groupby("num_rollouts")[key].mean().dropna()
        return values.index.to_numpy(), values.to_numpy()


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
        inside = [folder] if (folder / LOG).is_file() else sorted(path.parent for path in folder.glob(f"*/{LOG}"))
        if not inside:
            raise ValueError(
                f"'{folder}' is not a run and contains none: neither it nor a folder directly below it has a "
                f"{LOG}. Name the output_dir of `basis-rl train`, or the folder of `basis-rl sweep`."
            )
        found.update({path.resolve(): path for path in inside})
    return list(found.values())


def read_run(folder: Path) -> Run:
    """Read a run, which may be in progress; a ValueError if it has not logged rewards and numbers of rollouts.

    What is in its files may be anything: what is no number in the log, and what has another shape than it should have,
    is left out.
    """
    log = pd.DataFrame(map(_numbers, read_lines(folder / LOG)))
    if not {"step", "reward", "num_rollouts"} <= {*log}:
        raise ValueError(f"'{folder}' has logged no `reward` and `num_rollouts` yet, by which runs are compared.")
    # Training, evaluation and the end of the run have rows of their own for a step.
    log = log[log["num_rollouts"] >= 0].groupby("step", as_index=False).last()
    if not log["num_rollouts"].max() > 0:
        raise ValueError(f"'{folder}' has sampled no rollouts yet.")
    info = _known(_mapping(folder / RUN_FILE))
    recipe = _mapping(folder / "recipe.yaml", yaml.safe_load) or _recorded(folder / RUN_FILE, info)
    return Run(folder, log, flatten_dict(recipe), info)


def _recorded(path: Path, info: Mapping[str, Any]) -> dict[str, Any]:
    """What a record says in place of a recipe, which a run from Python does not have: changed settings, and parts."""
    changed = _mapping(path, lambda _: yaml.safe_load(info.get("recipe", "")))
    return {key: info[key] for key in _PARTS if key in info} | changed


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What is a number in a row of a log."""
    return {
        key: float(value)
        for key, value in row.items()
        if type(value) in (int, float) and -_LARGEST < value < _LARGEST and key.isprintable()
    }


def _mapping(path: Path, load: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """What is in a file, with plain keys and values; empty without one.

    Raises:
        ValueError: it is no mapping, or too much.
    """
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        found = _plain(load(path.read_text()) or {}, iter(range(_MOST_VALUES)))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not a mapping")
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"'{path}' cannot be read: {' '.join(str(error).split())[:300]}.") from error
    return found


def _plain(value: Any, left: Iterator[int]) -> Any:
    """`value` in JSON's types, with texts that can be printed; ValueError where it has more parts than are `left`."""
    # YAML's aliases can make a small file enormous.
    if next(left, None) is None:
        raise ValueError("it holds too many values")
    if isinstance(value, Mapping):
        return {_plain(str(key), left): _plain(entry, left) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(entry, left) for entry in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if text.replace("\n", "").isprintable() else text.encode("unicode_escape").decode()


def _known(info: dict[str, Any]) -> dict[str, Any]:
    """Of a record what has the shape that it should have."""
    shapes: dict[str, type] = {"compared": dict, "artefacts": list, "hardware": str, "versions": dict, "finished": bool}
    shapes["recipe"] = str
    known: dict[str, Any] = {key: value for key, value in info.items() if isinstance(value, shapes.get(key, object))}
    parts = {"kind": str, "source": str, "sha256": str, "rollouts": int}
    versions = {name: version for name, version in known.get("versions", {}).items() if isinstance(version, str)}
    made = [each for each in known.get("artefacts", []) if isinstance(each, dict)]
    made = [each for each in made if all(isinstance(each.get(key), shape) for key, shape in parts.items())]
    return {**known, "artefacts": made, "versions": versions}


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
        pairs = list(zip(labels, longer, strict=True))
        variants = Counter(old for old, _ in set(pairs))
        labels = [new if key == "baseline" or variants[old] > 1 else old for old, new in pairs]
    labels = [label or name for label, name in zip(labels, names, strict=True)]
    uses = Counter(labels)
    return [label if uses[label] == 1 else f"{label} ({name})" for label, name in zip(labels, names, strict=True)]


def _part(key: str, value: Any) -> str:
    name = _SHORT.get(key, key.rpartition(".")[2])
    shown = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{name}={shown}" if name and shown else shown
