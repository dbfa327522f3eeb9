"""Runs the unit tests that have a CUDA path on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree

from benchmarks.gpu.stage import Findings, need

ON_DEVICE = ["tests/device"]
# Written for a CPU; they train on the device that BASIS_TEST_DEVICE names.
ON_GPU_TOO = ["tests/trainer/test_against_trl.py", "tests/trainer/test_energies.py"]


def run(found: Findings) -> None:
    """Run the tests, each of which counts as a check."""
    need("pytest")
    report = found.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [*ON_DEVICE, *(ON_GPU_TOO if found.cuda else ())]
    # The settings of pyproject.toml need plug-ins that may be missing here; others that are here must not interfere.
    done = subprocess.run(
        [*command, "-o", "timeout=", "-W", "ignore::pytest.PytestConfigWarning"],
        env={**os.environ, "BASIS_TEST_DEVICE": found.device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, check=False,
    )  # fmt: skip
    found.check("pytest ran", report.is_file() and done.returncode in (0, 1), f"exit code {done.returncode}")
    if not report.is_file():
        return
    counted = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        verdict = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counted[verdict] += 1
        told = (bad[0].get("message") or bad[0].tag) if bad else ""
        found.check(f"{case.get('classname')}::{case.get('name')}", not bad, told[:300])
    found.figure("tests", counted)
