"""`python -m benchmarks.gpu`: a stage that hangs, dies or fails leaves its figures and does not stop the rest."""

import datetime
import json
import subprocess
import textwrap

import psutil
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import needs, overhead
from benchmarks.gpu.runner import ROOT, Stage, environment, line, results_file, run_stages
from benchmarks.gpu.stage import Findings, write_json

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
PARTS = """
    import os, time
    from pathlib import Path
    from benchmarks.gpu.stage import need
    here = Path(__file__).parent
    def noted(found, name, fails=False):
        (here / "order").open("a").write(name)
        found.figure(name, len((here / "order").read_text()))
        found.check(f"{name} holds", not fails)
    def run(found):
        corrected = (here / "corrected").exists()
        found.attempt("a", noted, found, "a")
        found.attempt("b", noted, found, "b", fails=not corrected)
        found.attempt("c", need, *(() if corrected else ("no_such_module",)))
        if not corrected:
            time.sleep(600)
"""
LACKS = """
    from benchmarks.gpu.stage import need
    def run(found):
        found.attempt("first", need, "json")
        found.attempt("second", need, "json", "no_such_module", "neither_this")
"""
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


def test_a_stage_continues_with_the_parts_that_have_not_passed(tmp_path, stage):
    stages = [stage("parts", PARTS, limit=5.0)]
    path = tmp_path / "results.json"
    (killed,) = run_stages(stages, "cpu", path, budget=100).values()
    assert killed["status"] == "failed", "it hangs"
    assert {name: part["status"] for name, part in killed["parts"].items()} == {
        "a": "passed",
        "b": "failed",
        "c": "skipped",
    }
    (tmp_path / "corrected").touch()
    (done,) = run_stages(stages, "cpu", path, budget=100).values()
    assert done["status"] == "passed"
    assert (tmp_path / "order").read_text() == "abb"
    assert done["figures"] == {"a": 1, "b": 3}
    assert done["checks"] == 2
    assert done["earlier"]["parts"] == ["a"]


def test_a_stage_that_lacks_something_says_so_and_has_not_passed(tmp_path, stage):
    stages = [stage("lacks", LACKS)]
    (done,) = run_stages(stages, "cpu", tmp_path / "results.json", budget=100).values()
    assert done["status"] == "incomplete"
    assert done["reason"] == "second: not installed: no_such_module, neither_this"


def test_without_time_stages_are_skipped_or_ended_and_say_so(tmp_path, stage, monkeypatch):
    path = tmp_path / "results.json"
    done = run_stages([stage("late", PASSES)], "cpu", path, budget=5)
    assert done["late"]["status"] == "skipped"
    assert "of the 5 s for all stages" in done["late"]["reason"]
    assert not list(tmp_path.glob("*.log"))
    monkeypatch.setattr("benchmarks.gpu.runner.LEAST", 1.0)
    done = run_stages([stage("hangs", HANGS, limit=60.0)], "cpu", path, budget=1.5)
    assert done["hangs"]["status"] == "incomplete", "it had less than its limit"
    assert "1.5 s for all stages were over" in done["hangs"]["reason"]
    assert list(results_of(tmp_path)["stages"]) == ["late", "hangs"]


def test_what_a_stage_has_found_is_in_the_results_while_it_runs(tmp_path, stage, monkeypatch):
    kept, path = [], tmp_path / "results.json"

    def write(where, content):
        write_json(where, content)
        kept.extend([json.loads(path.read_text())["stages"]["hangs"]] if where == path else [])

    monkeypatch.setattr("benchmarks.gpu.runner.write_json", write)
    run_stages([stage("hangs", HANGS, limit=5.0)], "cpu", path, budget=100)
    assert [entry["status"] for entry in kept][-2:] == ["running", "failed"]
    assert kept[0]["figures"]["child"] > 0


def test_a_run_that_goes_past_midnight_continues_its_results(tmp_path):
    today = datetime.date.today()
    yesterday, older = (tmp_path / f"nvidia-h200_{today - datetime.timedelta(days=days)}.json" for days in (1, 2))
    older.touch()
    assert results_file(tmp_path, "NVIDIA H200").name == f"nvidia-h200_{today}.json"
    yesterday.touch()
    assert results_file(tmp_path, "NVIDIA H200") == yesterday
    assert results_file(tmp_path, "NVIDIA H100") != yesterday
    new = results_file(tmp_path, "NVIDIA H200", fresh=True)
    new.touch()
    assert results_file(tmp_path, "NVIDIA H200") == new
    results_file(tmp_path, "NVIDIA H200", fresh=True)
    assert yesterday.exists()
    assert not new.exists()


def test_only_stages_that_want_several_gpus_see_them(monkeypatch):
    one, all_of_them = Stage("one", "one", 1.0), Stage("all", "all", 1.0, all_gpus=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment(one, "cuda")["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert environment(one, "cuda")["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment(all_of_them, "cuda")["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_the_overhead_is_complete_or_a_failure_and_continues(tmp_path, monkeypatch):
    seconds = {"TRL": 2.0, "none": 2.0, "otb": 3.0}
    asked = []

    def step(found, side, rollouts, tokens):
        asked.append(side)
        if asked == ["TRL", "none"]:
            raise RuntimeError("out of memory")
        return seconds[side]

    monkeypatch.setattr(overhead, "whole_step", step)
    found = Findings(tmp_path / "found.json", "cpu", tmp_path)
    with found.part("steps"):
        overhead.steps(found, "steps", list(seconds), 8, 10, 1)
    assert found.parts["steps"]["status"] == "failed"
    assert "not none" in found.faults[-1]
    assert "steps: added to `none`" not in found.figures, "there is nothing to compare with"
    again = Findings(tmp_path / "found.json", "cpu", tmp_path, before=json.loads((tmp_path / "found.json").read_text()))
    overhead.steps(again, "steps", list(seconds), 8, 10, 1)
    assert asked == ["TRL", "none", "otb", "none"]
    assert not again.faults
    assert again.figures["steps: added to `none`"] == {"TRL": "+0.0%", "none": "+0.0%", "otb": "+50.0%"}
    assert again.figures["steps: tokens per second"]["otb"] == pytest.approx(80 / 3)
    late = Findings(tmp_path / "found.json", "cpu", tmp_path, limit=-1.0)
    monkeypatch.setattr(overhead, "whole_step", lambda *_: 1.0)
    overhead.steps(late, "steps", list(seconds), 8, 10, 1)
    assert late.faults


def test_what_is_missing_is_named_with_the_way_out(monkeypatch):
    assert not needs.complaint()
    monkeypatch.setattr(needs, "ON_THE_MACHINE", {"no_pandas": "", "json": ""})
    monkeypatch.setattr(needs, "CARRIED", {"no_trl": "trl"})
    monkeypatch.setattr(needs, "OPTIONAL", {"no_pytest": "stage tests"})
    with pytest.raises(SystemExit, match=r"lacks no_pandas, which must .* lacks trl\. .*make gpu-wheels"):
        command.main(["--cpu"])
    assert needs.notes() == ["no_pytest is not installed: skipped are stage tests."]


def test_the_wheels_are_what_the_stages_need():
    wheels = {line for line in (ROOT / "requirements/gpu.txt").read_text().splitlines() if not line.startswith("#")}
    wanted = {package or module for module, package in needs.CARRIED.items()} | set(needs.OPTIONAL) - {"vllm"}
    assert wanted - {"deepspeed"} <= wheels, "`make gpu-wheels` builds DeepSpeed's"
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert wheels <= pinned


def test_make_gpu_passes_options_on():
    told = subprocess.run(
        ["make", "-n", "gpu", "GPU_ARGS=--output elsewhere"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout.count("--output elsewhere") == 2, "with .venv and without"


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
