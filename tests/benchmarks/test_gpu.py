"""`python -m benchmarks.gpu`: a stage that hangs, dies or fails leaves its figures and does not stop the rest."""

import json
import re
import textwrap

import psutil
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import measure, needs

HANGS = """
    import subprocess, sys, time
    def test(record_property):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("its child is", child.pid, flush=True)
        time.sleep(600)
"""
PASSES = """
    import os
    from pathlib import Path
    def test(record_property):
        log = Path(__file__).with_suffix(".log")
        log.write_text((log.read_text() if log.exists() else "") + "run ")
        record_property("device", os.environ["BASIS_TEST_DEVICE"])
"""
FAULTY = """
    def test(record_property):
        record_property("off by", 0.3)
        assert 1 == 2, "off by little"
    def test_after():
        pass
"""
SKIPS = "def test():\n    pytest.skip('no_such_module is missing')\n"
DIES = "import os\ndef test():\n    os.kill(os.getpid(), 9)\n"


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """Makes these the stages of the command, each a file of tests."""

    def made(texts, limit=60.0):
        found = {}
        for name, text in texts.items():
            path = tmp_path / f"test_{name}.py"
            path.write_text("import pytest\npytestmark = pytest.mark.gpu\n" + textwrap.dedent(text))
            found[name] = (limit, (str(path),))
        monkeypatch.setattr(command, "STAGES", found)
        monkeypatch.setattr(command, "TESTS", tmp_path)
        return list(found)

    return made


def test_a_stage_that_hangs_is_ended_with_all_it_started_and_the_next_one_runs(tmp_path, stages, monkeypatch):
    names = stages({"hangs": HANGS, "passes": PASSES})
    monkeypatch.setitem(command.STAGES, "hangs", (8.0, command.STAGES["hangs"][1]))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-s")
    done = command.run_stages(names, "cpu", tmp_path / "results.json")
    assert done["hangs"]["status"] == "failed"
    assert "not done after 8 s" in done["hangs"]["reason"]
    child = int(re.search(r"its child is (\d+)", done["hangs"]["reason"])[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert done["passes"]["status"] == "passed"
    assert done["passes"]["figures"] == {"test: device": "cpu"}
    assert json.loads((tmp_path / "results.json").read_text())["stages"] == done


def test_what_a_stage_found_is_kept_and_what_has_passed_is_not_run_again(tmp_path, stages):
    names = stages({"faulty": FAULTY, "dies": DIES, "skips": SKIPS, "passes": PASSES})
    path = tmp_path / "results.json"
    done = command.run_stages(names, "cpu", path)
    statuses = {name: entry["status"] for name, entry in done.items()}
    assert statuses == {"faulty": "failed", "dies": "failed", "skips": "incomplete", "passes": "passed"}
    assert "off by little" in done["faulty"]["reason"]
    assert done["faulty"]["figures"] == {"test: off by": "0.3"}
    assert done["faulty"]["checks"] == 2
    assert "-9" in done["dies"]["reason"]
    assert "no_such_module" in done["skips"]["reason"]
    results = json.loads(path.read_text())
    assert {"torch", "transformers"} <= results["versions"].keys()
    assert all(entry["date"] for entry in results["stages"].values())
    stages({"faulty": PASSES, "passes": FAULTY})  # the first was corrected
    done = command.run_stages(["faulty", "passes"], "cpu", path)
    assert [done[name]["status"] for name in ("faulty", "passes")] == ["passed", "passed"]


def test_a_failed_stage_is_the_commands_exit_code_and_results_have_device_and_date(tmp_path, stages, monkeypatch):
    stages({"faulty": FAULTY, "passes": PASSES})
    monkeypatch.setattr(needs, "device_name", lambda cpu: "NVIDIA H200")
    with pytest.raises(SystemExit) as ended:
        command.main(["--output", str(tmp_path)])
    assert ended.value.code == 1
    (path,) = tmp_path.glob("nvidia-h200_20*-*-*.json")
    assert json.loads(path.read_text())["device"] == "NVIDIA H200"
    assert command.main(["--output", str(tmp_path), "--stages", "passes"])["passes"]["status"] == "passed"


def test_every_file_of_tests_has_a_stage():
    tested = {command.TESTS / name for _, files in command.STAGES.values() for name in files}
    assert {*(command.TESTS / "device").glob("test_*.py")} <= tested
    assert all(path.is_file() for path in tested)


def test_figures_are_complete_or_a_failure_and_what_was_measured_is_not_measured_again(tmp_path, monkeypatch):
    seconds = {"TRL": 2.0, "none": 2.0, "otb": 3.0}
    asked = []

    def step(device, side, rollouts, tokens):
        asked.append(side)
        if asked == ["TRL", "none"]:
            raise RuntimeError("out of memory")
        return {"seconds": seconds[side]}

    monkeypatch.setattr(measure, "whole_step", step)
    monkeypatch.setattr(measure, "SOME", tuple(seconds))
    monkeypatch.setattr(measure, "BASELINES", {})
    path = tmp_path / "results.json"
    path.write_text('{"stages": {"overhead": {}}}')
    assert measure.main("overhead", "cpu", str(path)) == 1
    figures = json.loads(path.read_text())["stages"]["overhead"]["figures"]
    assert "steps, 8 tokens: added to `none`" not in figures, "there is nothing to compare with"
    assert measure.main("overhead", "cpu", str(path)) == 0
    assert asked == ["TRL", "none", "otb", "TRL", "none", "otb", "none"]
    figures = json.loads(path.read_text())["stages"]["overhead"]["figures"]
    assert figures["steps, 8 tokens: added to `none`"] == {"TRL": "+0.0%", "none": "+0.0%", "otb": "+50.0%"}
    assert figures["steps, 8 tokens: tokens per second"]["otb"] == pytest.approx(64 / 3, rel=0.01)


@pytest.mark.long
def test_everything_is_measured_on_a_cpu(tmp_path):
    done = command.main(["--cpu", "--output", str(tmp_path), "--stages", *measure.MEASUREMENTS])
    assert {entry["status"] for entry in done.values()} == {"passed"}
    assert done["overhead"]["figures"]["steps, 8 tokens: added to `none`"]["none"] == "+0.0%"
    assert {"passes, 8 tokens", "passes, 16 tokens"} < done["time"]["figures"].keys()
