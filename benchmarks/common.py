"""What every benchmark says about itself, and where its numbers go."""

from __future__ import annotations

import datetime
import json
import os
import platform
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


def save(name: str, results: dict[str, Any]) -> None:
    """Write ``benchmarks/results/NAME.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**machine(), **results}, indent=1) + "\n")
    print(f"raw numbers: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
