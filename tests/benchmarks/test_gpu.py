"""`python -m benchmarks.gpu`: a stage that hangs, dies or fails leaves its figures and does not stop the rest."""

import json
import textwrap

import psutil
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.runner import Stage, line, run_stages

HANGS = """
    import subprocess, sys, time
    def run(found):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        found.figure("child", child.pid)
        print("on my way")
        time.sleep(600)
"""
PASSES = """
    from pathlib import Path
    def run(found):
        log = Path(__file__).with_suffix(".log")
        log.write_text((log.read_text() if log.exists() else "") + "run ")
        found.figure("device", found.device)
        found.check("one is one", 1 == 1)
"""
FAULTY = """
    def run(found):
        with found.part("first"):
            raise ValueError("the first part is broken")
        with found.part("second"):
            found.figure("second", 2)
        found.check("off by little", False, "0.3 off")
"""
DIES = "import os\ndef run(found):\n    found.figure('before', 1)\n    os.kill(os.getpid(), 9)\n"
RAISES = "def run(found):\n    raise RuntimeError('no such thing')\n"
SKIPS = "from benchmarks.gpu.stage import Skipped\ndef run(found):\n    raise Skipped('vLLM is not installed')\n"
LOOKS = """
    import json
    from pathlib import Path
    def run(found):
        results = json.loads(Path(__file__).with_name("results.json").read_text())
        found.figure("seen", list(results["stages"]))
"""


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Makes a stage of a text; its process finds it as a module of that name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def made(name, text, limit=30.0, **settings):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return Stage(name, name, limit, **settings)

    return made


def results_of(tmp_path):
    return json.loads((tmp_path / "results.json").read_text())


def test_a_stage_that_hangs_is_ended_with_all_it_started_and_the_next_one_runs(tmp_path, stage):
    stages = [stage("hangs", HANGS, limit=2.0), stage("passes", PASSES)]
    done = run_stages(stages, "cpu", tmp_path / "results.json", budget=100)
    assert done["hangs"]["status"] == "failed"
    assert "not done after 2 s" in done["hangs"]["reason"]
    assert "on my way" in done["hangs"]["reason"]
    child = done["hangs"]["figures"]["child"]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert done["passes"]["status"] == "passed"
    assert done["passes"]["figures"] == {"device": "cpu"}
    assert results_of(tmp_path)["stages"] == done


def test_what_a_stage_found_is_kept_however_it_ends(tmp_path, stage):
    texts = {"faulty": FAULTY, "dies": DIES, "raises": RAISES, "skips": SKIPS, "looks": LOOKS}
    stages = [stage(name, text) for name, text in texts.items()]
    done = run_stages(stages, "cpu", tmp_path / "results.json", budget=100)
    statuses = {name: entry["status"] for name, entry in done.items()}
    assert statuses == {"faulty": "failed", "dies": "failed", "raises": "failed", "skips": "skipped", "looks": "passed"}
    assert done["faulty"]["figures"]["second"] == 2
    assert "the first part is broken" in done["faulty"]["reason"]
    assert "off by little: 0.3 off" in done["faulty"]["reason"]
    assert done["dies"]["figures"] == {"before": 1}
    assert "-9" in done["dies"]["reason"]
    assert "no such thing" in done["raises"]["reason"]
    assert done["skips"]["reason"] == "vLLM is not installed"
    assert done["looks"]["figures"]["seen"] == ["faulty", "dies", "raises", "skips"], "written before the next begins"
    assert all("\n" not in line(name, entry) for name, entry in done.items())


def test_what_has_passed_is_not_run_again(tmp_path, stage):
    stages = [stage("passes", PASSES), stage("raises", RAISES)]
    path = tmp_path / "results.json"
    run_stages(stages, "cpu", path, budget=100)
    stage("raises", PASSES)  # it was corrected
    done = run_stages(stages, "cpu", path, budget=100)
    assert [entry["status"] for entry in done.values()] == ["passed", "passed"]
    assert (tmp_path / "passes.log").read_text() == (tmp_path / "raises.log").read_text() == "run "
    assert {"torch", "transformers"} <= results_of(tmp_path)["versions"].keys()
    assert all(entry["date"] for entry in done.values())


def test_without_time_or_gpu_stages_are_skipped_and_say_so(tmp_path, stage):
    stages = [stage("gpu_only", PASSES, gpu_only="memory is counted on a GPU only"), stage("late", PASSES)]
    done = run_stages(stages, "cpu", tmp_path / "results.json", budget=5)
    assert done["gpu_only"] | {"status": "skipped", "reason": "memory is counted on a GPU only"} == done["gpu_only"]
    assert done["late"]["status"] == "skipped"
    assert "of the 5 s for all stages" in done["late"]["reason"]
    assert not list(tmp_path.glob("*.log"))


def test_without_a_gpu_the_command_says_what_to_do(monkeypatch):
    monkeypatch.setattr(command, "device_name", lambda device: "")
    with pytest.raises(SystemExit, match="--cpu"):
        command.main([])


def test_without_wheels_the_command_says_where_they_come_from(tmp_path):
    with pytest.raises(SystemExit, match="make gpu-wheels"):
        command.main(["--wheels", str(tmp_path)])


def test_a_failed_stage_is_the_commands_exit_code_and_results_have_device_and_date(tmp_path, stage, monkeypatch):
    monkeypatch.setattr(command, "STAGES", (stage("raises", RAISES), stage("passes", PASSES)))
    monkeypatch.setattr(command, "device_name", lambda device: "NVIDIA H200")
    with pytest.raises(SystemExit) as ended:
        command.main(["--output", str(tmp_path)])
    assert ended.value.code == 1
    (path,) = tmp_path.glob("nvidia-h200_20*-*-*.json")
    assert json.loads(path.read_text())["device"] == "NVIDIA H200"
    assert command.main(["--output", str(tmp_path), "--stages", "passes"])["passes"]["status"] == "passed"


@pytest.mark.long
def test_quick_stages_pass_on_a_cpu(tmp_path):
    done = command.main(["--cpu", "--output", str(tmp_path), "--stages", "tests", "resume", "rewards", "selection"])
    assert {name: entry["status"] for name, entry in done.items()} == dict.fromkeys(done, "passed")
    assert done["tests"]["figures"]["tests"] == {"passed": 11, "failed": 0, "skipped": 0}
    assert done["resume"]["figures"]["ppo: largest difference of a weight"] == 0.0
