"""Shared by all benchmarks and studies: facts about machine and code, options, and where the numbers are saved."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).with_name("results")


def commit() -> str | None:
    """The commit of this code, with the suffix ``-dirty`` if code was changed or added since; None without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=RESULTS.parents[1], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        code = ("basis_rl", "examples", "benchmarks/*.py", "studies/*.py", "pyproject.toml")
        changed = git("status", "--porcelain", "--", *code)
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


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
        "versions": versions(("basis-rl", "torch", "trl", "transformers")),
        "commit": commit(),
    }


def parser_of(doc: str | None, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """A parser with the options of every script: ``--help`` (shows `doc`), ``--quick``, and ``--parts`` for `parts`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="run for seconds only, to check that it works; its numbers mean nothing"
    )
    if names := list(parts):
        parser.add_argument("--parts", nargs="+", choices=names, default=names, help="run only these parts (all)")
    return parser


def one_thread() -> None:
    """Let torch use one thread, so that numbers and times do not depend on how many cores are free."""
    import torch

    torch.set_num_threads(1)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": median(values), "least": min(values), "largest": max(values)}


def save(name: str, results: dict[str, Any], folder: Path = RESULTS) -> None:
    """Write ``NAME.json`` in `folder`, to six digits, each list or dictionary of numbers on one line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps(rounded({**machine(), **results}), indent=1)
    numbers = r"\[[^][{}\"]*\]|\{(?:\s*\"[^\"]*\": [^][{}\"]*?)*\}"
    path.write_text(re.sub(numbers, lambda found: " ".join(found[0].split()), text) + "\n")
    print(f"raw numbers: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def rounded(value: Any) -> Any:
    """The same value with all floats in it rounded to six digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_json(path: Path, content: Any) -> None:
    """Replace the content of a file in one atomic step."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1, default=str) + "\n")
    part.replace(path)


def peak_bytes(work: Callable[[], Any]) -> int:
    """Peak of the tensor memory that `work` allocates, beyond what was allocated before."""
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
