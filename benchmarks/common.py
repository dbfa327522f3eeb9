"""What every benchmark says about itself, and where its numbers go."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def machine() -> dict[str, Any]:
    """Date, processor and versions."""
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


def places(parser: argparse.ArgumentParser, name: str) -> None:
    """Options of where a study puts what it makes; `placed` fills in what is not given."""
    parser.add_argument("--output", type=Path, help=f"runs that are done stay here (runs/{name})")
    parser.add_argument("--results", type=Path, help="folder of the plots and the raw numbers (benchmarks/results)")
    parser.set_defaults(study=name)


def placed(options: argparse.Namespace) -> argparse.Namespace:
    """Everything of a ``--quick`` run in a temporary folder, unless other places are asked for: its numbers mean
    nothing, and must not replace those of a study."""
    quick = Path(tempfile.mkdtemp(prefix=f"{options.study}-")) if options.quick else None
    options.output = options.output or quick or Path("runs") / options.study
    options.results = options.results or quick or RESULTS
    return options


def kept(file: Path, settings: dict[str, Any], make: Callable[[], dict[str, Any]] | None) -> tuple[Any, bool]:
    """The run in `file`, made and written if it is not there; and whether it was made now. ``(None, False)`` if it is
    not there and `make` is None.

    Raises:
        SystemExit: the run in `file` has other settings.
    """
    settings = json.loads(json.dumps(settings))
    if not file.is_file():
        if make is None:
            return None, False
        print(f"{file.stem} ...", flush=True)
        began, found = time.perf_counter(), make()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"settings": settings, **found}))
        partial.replace(file)
        print(f"{file.stem}: {time.perf_counter() - began:.0f} s", flush=True)
        return found, True
    there = json.loads(file.read_text())
    if there.pop("settings") != settings:
        raise SystemExit(f"{file} is of other settings: give another --output, or remove it.")
    return there, False


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
