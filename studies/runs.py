"""Stores the runs of a study, and decides where a study writes its output."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import machine, parser_of

RESULTS = Path(__file__).with_name("results")


def rounded(value: Any) -> Any:
    """`value` with every float rounded to four significant digits, and NaN, which JSON does not have, as None."""
    if isinstance(value, float):
        return None if value != value else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def study_parser(doc: str | None, name: str, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """A parser with the options that every study has: those of `parser_of`, and the folders that it writes to.

    `placed` fills in the folders that are not given.
    """
    parser = parser_of(doc, parts)
    parser.add_argument(
        "--output", type=Path, help=f"folder for stored runs, and for the results of a partial study (runs/{name})"
    )
    parser.add_argument("--results", type=Path, help="folder for plots and raw numbers (studies/results)")
    parser.set_defaults(study=name)
    return parser


def placed(options: argparse.Namespace, whole: argparse.Namespace | None = None) -> argparse.Namespace:
    """`options` with the folders filled in that were not given.

    A ``--quick`` run writes everything to a temporary folder, since its numbers mean nothing. `whole` are the options
    of the whole study. With other options, the results stay in the output folder, so that a partial study does not
    overwrite the results of the whole one.
    """
    where = {"output": None, "results": None}
    part = whole is not None and {**vars(options), **where} != {**vars(whole), **where}
    runs = Path("runs") / options.study
    options.output = options.output or (Path(tempfile.mkdtemp(prefix=f"{runs.name}-")) if options.quick else runs)
    options.results = options.results or (options.output if options.quick or part else RESULTS)
    return options


def kept(file: Path, settings: dict[str, Any], make: Callable[[], dict[str, Any]] | None) -> tuple[Any, bool]:
    """The run in `file`, and whether it was made by this call.

    If the file does not exist, `make` makes the run and the file is written; if `make` is None, the result is
    ``(None, False)``. The file also has the settings of the run, and when, where and by which code it was made
    (`origins`).

    Raises:
        SystemExit: the run in `file` has other settings.
    """
    settings = json.loads(json.dumps(settings))
    if not file.is_file():
        if make is None:
            return None, False
        print(f"{file.stem} ...", flush=True)
        origin, began, found = machine(), time.perf_counter(), make()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"settings": settings, "machine": origin, **found}))
        partial.replace(file)
        print(f"{file.stem}: {time.perf_counter() - began:.0f} s", flush=True)
        return found, True
    there = json.loads(file.read_text())
    if there.pop("settings") != settings:
        raise SystemExit(f"{file} was made with other settings. Give another --output, or remove the file.")
    there.pop("machine", None)
    return there, False


def _origin(file: Path) -> dict[str, Any] | None:
    """The `machine` record of the run in `file` (written by `kept`), None if it has none."""
    origin: dict[str, Any] | None = json.loads(file.read_text()).get("machine")
    return origin


def origins(files: Iterable[Path]) -> list[dict[str, Any] | None]:
    """The distinct `machine` records of the runs in `files`; None for runs without one.

    Store it with results that are computed from stored runs: `save` dates the results, not the runs.
    """
    found: list[dict[str, Any] | None] = []
    for origin in map(_origin, files):
        if origin not in found:
            found.append(origin)
    return found


@dataclass(frozen=True)
class Planned:
    """A run that belongs to a study.

    Attributes:
        labels: the keys and values that name it in the results.
        file: where it is stored.
        settings: its settings, which a stored run must match (`kept`).
        make: makes the run.
    """

    labels: dict[str, Any]
    file: Path
    settings: dict[str, Any]
    make: Callable[[], dict[str, Any]]


def kept_runs(planned: Sequence[Planned], at_most: int | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The stored runs and those made by this call, each with its labels; and facts about them for the results.

    The facts are ``runs made`` (`origins`), and how many are ``missing`` because at most `at_most` runs are made. Each
    run has the index of its own entry of ``runs made`` as ``made``.
    """
    runs, files, made = [], [], 0
    for plan in planned:
        found, fresh = kept(plan.file, plan.settings, None if made == at_most else plan.make)
        made += fresh
        if found is not None:
            runs.append({**plan.labels, **found})
            files.append(plan.file)
    everywhere = origins(files)
    for run, file in zip(runs, files, strict=True):
        run["made"] = everywhere.index(_origin(file))
    return runs, {"runs made": everywhere, "missing": len(planned) - len(runs)}


def _common(origins_there: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """What all records agree on, for results that do not say which run is whose; None if that is nothing."""
    known = [origin for origin in origins_there if origin]
    return {key: value for key, value in known[0].items() if all(o.get(key) == value for o in known)} if known else None


def restore(planned: Sequence[Planned], results: Path) -> int:
    """Restore the files of runs whose numbers are in the study's `results`; returns how many were restored.

    Runs take hours, and their folder is not part of the repository, but the results are. A run is restored if the
    results have the same settings: their ``scale`` together with the run's labels must equal the run's settings.
    """
    if not results.is_file():
        return 0
    found = json.loads(results.read_text())
    origins_there = found.get("runs made", [])
    count = 0
    for plan in planned:
        labels = json.loads(json.dumps(plan.labels))
        there = [run for run in found["runs"] if all(run.get(key) == value for key, value in labels.items())]
        settings = json.loads(json.dumps(plan.settings))
        if plan.file.is_file() or len(there) != 1 or {**found["scale"], **labels} != settings:
            continue
        columns = {key: value for key, value in there[0].items() if key not in labels and key != "made"}
        machine_then = origins_there[there[0]["made"]] if "made" in there[0] else _common(origins_there)
        plan.file.parent.mkdir(parents=True, exist_ok=True)
        plan.file.write_text(json.dumps({"settings": settings, "machine": machine_then, **columns}))
        count += 1
    return count
