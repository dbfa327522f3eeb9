"""What every benchmark says about itself, and where its numbers go."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def commit() -> str | None:
    """The commit of this code, with ``-dirty`` behind it if code has changed or come since; None where git does not
    know."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=RESULTS.parents[1], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "basis_rl", "examples", "benchmarks/*.py", "pyproject.toml")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """Date, processor, versions and commit."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("basis-rl", "torch", "trl", "transformers")},
        "commit": commit(),
    }


def one_thread() -> None:
    """Numbers and seconds that do not depend on how many cores are free."""
    import torch

    torch.set_num_threads(1)


def rounded(value: Any) -> Any:
    """`value` with four significant digits in every float; NaN, which JSON does not know, as None."""
    if isinstance(value, float):
        return None if value != value else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def places(parser: argparse.ArgumentParser, name: str, output: str = "runs that are done stay here") -> None:
    """Options of where a study puts what it makes; `placed` fills in what is not given."""
    parser.add_argument("--output", type=Path, help=f"{output} (runs/{name})")
    parser.add_argument("--results", type=Path, help="folder of the plots and the raw numbers (benchmarks/results)")
    parser.set_defaults(study=name)


def placed(options: argparse.Namespace, whole: argparse.Namespace | None = None) -> argparse.Namespace:
    """`options` with the places that were not asked for.

    Everything of a ``--quick`` run is put in a temporary folder, since its numbers mean nothing. `whole` are the
    options of the whole study: the results of others stay in the output folder, so that no part replaces the study's.
    """
    where = {"output": None, "results": None}
    quick = getattr(options, "quick", False)
    part = whole is not None and {**vars(options), **where} != {**vars(whole), **where}
    runs = Path("runs") / options.study
    options.output = options.output or (Path(tempfile.mkdtemp(prefix=f"{runs.name}-")) if quick else runs)
    options.results = options.results or (options.output if quick or part else RESULTS)
    return options


def kept(file: Path, settings: dict[str, Any], make: Callable[[], dict[str, Any]] | None) -> tuple[Any, bool]:
    """The run in `file`, made and written if it is not there; and whether it was made now. ``(None, False)`` if it is
    not there and `make` is None. Beside the run the file says of which settings it is, and when, where and by which
    code it was made (`origins`).

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
        raise SystemExit(f"{file} is of other settings: give another --output, or remove it.")
    there.pop("machine", None)
    return there, False


def origins(files: Iterable[Path]) -> list[dict[str, Any] | None]:
    """`machine` as it was for the runs in `files` (those of `kept`), each different one once; None for runs that do not
    say. It belongs beside results that are made of kept runs: `save` dates the results, not the runs."""
    found: list[dict[str, Any] | None] = []
    for origin in (json.loads(file.read_text()).get("machine") for file in files):
        if origin not in found:
            found.append(origin)
    return found


def save(name: str, results: dict[str, Any], folder: Path = RESULTS) -> None:
    """Write ``benchmarks/results/NAME.json`` (or in another folder), each list of numbers on one line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps({**machine(), **results}, indent=1)
    path.write_text(re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()), text) + "\n")
    print(f"raw numbers: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def peak_bytes(work: Callable[[], Any]) -> int:
    """Most tensor memory that `work` had allocated at one time beyond what was there before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = work()
    total = peak = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    del kept
    return peak
