"""Stores the runs and the table of a study, and decides where a study writes its output."""

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


def rounded(value: Any, digits: int = 4) -> Any:
    """`value` with every float rounded to significant `digits`, and NaN, which JSON does not have, as None."""
    if isinstance(value, float):
        return None if value != value else float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items()}
    return [rounded(each, digits) for each in value] if isinstance(value, (list, tuple)) else value


DIGITS = 6  # significant digits in a table, two more than any page shows


def table_text(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """A small table as JSON: `facts`, ``columns``, and ``rows``, of which each has a line of its own.

    All `rows` have the same keys. Numbers have `DIGITS` significant digits.
    """
    columns = [*rows[0]] if rows else []
    facts = {**facts, "columns": columns}
    head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in rounded(facts, DIGITS).items()]
    lines = [f"  {json.dumps(rounded([row[column] for column in columns], DIGITS))}" for row in rows]
    return "{\n" + ",\n".join(head) + ',\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n"


def save_table(name: str, facts: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write the table ``NAME.json`` in `folder`, with date, processor, versions and commit (`machine`)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(table_text({**machine(), **facts}, rows))
    print(f"table: {path}")


def read_table(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The facts and the rows of a table of `save_table`."""
    facts = json.loads(path.read_text())
    columns, rows = facts.pop("columns"), facts.pop("rows")
    return facts, [dict(zip(columns, row, strict=True)) for row in rows]


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


def origins(files: Iterable[Path]) -> list[dict[str, Any] | None]:
    """The distinct `machine` records of the runs in `files` (written by `kept`); None for runs without one.

    Store it with results that are computed from stored runs: `save_table` dates the table, not the runs.
    """
    found: list[dict[str, Any] | None] = []
    for file in files:
        origin = json.loads(file.read_text()).get("machine")
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
    """The stored runs and those made by this call, each with its labels; and facts about them for the table.

    The facts are ``runs made`` (`origins`), and how many runs are ``missing`` because at most `at_most` are made.
    """
    runs, files, made = [], [], 0
    for plan in planned:
        found, fresh = kept(plan.file, plan.settings, None if made == at_most else plan.make)
        made += fresh
        if found is not None:
            runs.append({**plan.labels, **found})
            files.append(plan.file)
    return runs, {"runs made": origins(files), "missing": len(planned) - len(runs)}
