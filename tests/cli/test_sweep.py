"""Sweeps: the same rollouts for every baseline, checks before anything runs, what is finished is not done again."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from basis_rl.baselines import BASELINES
from basis_rl.cli import sweep
from basis_rl.cli.main import main
from basis_rl.cli.sweep import parse_entry, plan, several
from basis_rl.report.runs import read_run
from tests.run.test_run_lock import HOLDER

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

ROOT = Path(__file__).resolve().parents[2]


OWN = {"baseline": "batch_mean", "num_generations": 1, "max_steps": 12}  # one rollout per prompt, 16 a batch


@pytest.fixture
def stand_in(monkeypatch):
    """In place of `basis-rl train`: it trains nothing."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sweep, "_TRAIN", [sys.executable, str(Path(__file__).with_name("stand_in.py"))])


def rollouts(run):
    """Drawn in a run: batch by batch, as the trainer would."""
    args = run.recipe.args
    batches = args.max_steps * args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
    greedy = args.generation_batch_size // args.num_generations if run.recipe.run.baseline == "remax" else 0
    return batches * (args.generation_batch_size + greedy)


def test_every_baseline_draws_the_same_number_of_rollouts(recipe):
    names = [name for name in BASELINES if name not in ("basis", "bv_blend", "a_star_po")]
    runs = {run.recipe.run.baseline: run for run in plan(recipe(), names, [0])}
    assert list(runs) == names
    for name, run in runs.items():
        assert rollouts(run) == 96, name
        assert run.recipe.args.generation_batch_size == 16
        assert run.recipe.args.num_generations == (8 if BASELINES[name].min_group_size > 1 else 1)
    assert runs["remax"].recipe.args.max_steps == 6
    budgeted = plan(recipe(), ["rloo:num_generations=4", "none", "remax"], [0], budget=160)
    assert [rollouts(run) for run in budgeted] == [160, 160, 160]
    assert [run.recipe.args.num_generations for run in budgeted] == [4, 1, 1]
    assert [rollouts(run) for run in plan(recipe(), ["none", "remax"], [0], budget=170)] == [160, 160]
    groups = plan(recipe(), ["rloo", "grpo:num_generations=8"], [0], overrides=["--num_generations", "2"])
    assert [run.recipe.args.num_generations for run in groups] == [2, 8]
    other = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    assert [rollouts(run) for run in plan(recipe(**other, num_iterations=3), ["none", "rloo"], [0])] == [64, 64]


def test_runs_of_several_processes_have_larger_batches(recipe):
    with several(4):
        (run,) = plan(recipe(per_device_train_batch_size=2), ["rloo"], [0], budget=96)
    assert rollouts(run) == 96
    assert "--max_steps" not in run.argv, "12 steps of 2 x 4 ranks"
    assert run.recipe.resolved["per_device_train_batch_size"] == 2


def test_names_settings_and_parameters_of_baselines(recipe):
    assert parse_entry("my.module:Mine:num_generations=4") == ("my.module:Mine", {"num_generations": "4"})
    path = recipe(baseline="basis", baseline_kwargs={"values": "v", "smoothing": 0.25, "weighting": "vop"})
    entries = ["basis", "basis_history", "rloo", "basis:baseline_kwargs.weighting=rvg"]
    runs = plan(path, entries, [3, 5], overrides=["--learning_rate", "1e-4,2e-4", "--beta=0.0"])
    assert len(runs) == 16
    assert len({run.recipe.args.output_dir for run in runs}) == 16
    found = {run.name: run for run in runs}
    first = found["basis-learning_rate=1e-4-seed3"].recipe
    assert (first.args.seed, first.args.learning_rate, first.run.baseline_kwargs["weighting"]) == (3, 1e-4, "vop")
    history = found["basis_history-learning_rate=2e-4-seed5"]
    assert history.recipe.run.baseline_kwargs == {"values": "v", "smoothing": 0.25}
    assert "without baseline_kwargs weighting" in history.notes
    assert found["rloo-learning_rate=2e-4-seed5"].recipe.run.baseline_kwargs == {}
    rvg = found["basis-baseline_kwargs.weighting=rvg-learning_rate=1e-4-seed3"].recipe.run.baseline_kwargs
    assert rvg == {"values": "v", "smoothing": 0.25, "weighting": "rvg"}
    grid = plan(path, ["basis", "rloo"], [0], overrides=["--baseline_kwargs.weighting", "unb,rvg"])
    assert [run.recipe.run.baseline_kwargs.get("weighting") for run in grid] == ["unb", "rvg", None]


def test_lists_are_no_grid_entries_keep_their_own_settings_and_runs_are_pushed_apart(recipe):
    overrides = ["--serve_devices", "4,5", "--eval_benchmarks", "aime24,math500", "--learning_rate", "1e-4,3e-4"]
    runs = plan(recipe(), ["none:learning_rate=1e-5"], [0], overrides=overrides)
    for run in runs:
        assert run.recipe.run.serve_devices == "4,5"
        assert run.recipe.run.eval_benchmarks == ["aime24", "math500"]
        assert run.recipe.args.learning_rate == 1e-5
    runs = plan(recipe(push_to_hub=True, hub_model_id="me/m"), ["none", "batch_mean"], [0, 1])
    assert len({run.recipe.args.hub_model_id for run in runs}) == 4


BAD = CASES["bad"]


@pytest.mark.parametrize("case", BAD)
def test_whatever_is_wrong_is_said_before_the_first_run(case, recipe, stand_in, tmp_path, capsys):
    baselines, changes, arguments, message = BAD[case]
    path = recipe(**changes)
    assert main(["sweep", path, "--baselines", ",".join(baselines), *arguments]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert not (tmp_path / "out-sweep").exists()


def test_runs_of_several_processes_are_launched_as_train_launches_them(recipe, stand_in, tmp_path):
    more = ["--output_dir", str(tmp_path / "s"), "--accelerate_config", "cpu", "--num_processes", "2"]
    assert main(["sweep", recipe(), "--baselines", "none", *more]) == 0
    given = yaml.safe_load((tmp_path / "s" / "none-seed0" / "recipe.yaml").read_text())
    assert (given["accelerate_config"], given["num_processes"]) == ("cpu", 2)


def test_a_second_sweep_in_the_same_folder_starts_nothing(recipe, stand_in, tmp_path, capsys):
    """It would take runs that the first one has not begun yet, and each would count the other's as failed."""
    out = tmp_path / "sweep"
    out.mkdir()
    arguments = ["--baselines", "none,rloo", "--seeds", "0", "--output_dir", str(out)]
    command = [sys.executable, "-c", HOLDER, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert main(["sweep", recipe(), *arguments]) == 2
        assert f"'{out}' is the output_dir of a run that is still going on" in capsys.readouterr().err
        assert not list(out.glob("*/calls"))
        other.communicate("")
    assert main(["sweep", recipe(), *arguments]) == 0


def test_a_failure_is_reported_at_the_end_and_costs_nothing_else(recipe, stand_in, tmp_path, capsys):
    out = tmp_path / "sweep"
    out.mkdir()
    (out / "broken").write_text("rloo")
    arguments = ["--baselines", "none,rloo,remax", "--seeds", "0,1", "--output_dir", str(out)]
    assert main(["sweep", recipe(), *arguments]) == 70
    said = capsys.readouterr().out
    for seed in (0, 1):
        assert f"FAILED: rloo-seed{seed}: RuntimeError: out of luck" in said
    assert "Runs: 4, settings: 2, 96 rollouts each" in said
    assert (out / "report" / "report.html").is_file()
    assert "step 12/12" in (out / "none-seed0" / "train.log").read_text()

    (out / "broken").unlink()
    assert main(["sweep", recipe(), *arguments]) == 0
    said = capsys.readouterr().out
    assert "6 runs in" in said
    assert "4 of them finished" in said
    calls = {run.name: (run / "calls").read_text().split() for run in out.iterdir() if (run / "calls").is_file()}
    once = [f"{name}-seed{seed}" for name in ("none", "remax") for seed in (0, 1)]
    assert calls == {"rloo-seed0": ["auto"] * 2, "rloo-seed1": ["auto"] * 2, **{name: ["auto"] for name in once}}
    assert "Runs: 6, settings: 3, 96 rollouts each" in said

    assert main(["sweep", recipe(weight_decay=0.25), *arguments]) == 2
    assert "(weight_decay: null, now 0.25)" in capsys.readouterr().err
    assert main(["sweep", recipe(learning_rate=5e-4), *arguments]) == 2
    assert "(learning_rate: 0.001, now 0.0005)" in capsys.readouterr().err


@pytest.mark.long
def test_two_real_runs_one_of_them_interrupted(recipe, tmp_path, capsys):
    path = recipe(max_steps=200, save_strategy="steps", save_steps=1000, logging_steps=2)
    arguments = ["sweep", path, "--baselines", "batch_mean,remax:num_generations=2"]
    arguments += ["--output_dir", str(tmp_path / "s")]
    command = [sys.executable, "-m", "basis_rl", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first, second = tmp_path / "s" / "batch_mean-seed0", tmp_path / "s" / "remax-num_generations=2-seed0"
    for _ in range(6000):
        time.sleep(0.05)
        if (first / "metrics.jsonl").is_file() and (first / "metrics.jsonl").read_text().count("\n") >= 2:
            break
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 75, output[-2000:]
    assert "Stopped. The same command resumes." in output
    stopped = re.search(r"Stopped by a signal after step (\d+) of 200\.", (first / "train.log").read_text())
    assert (first / f"checkpoint-{stopped[1]}").is_dir()
    assert not (first / "model.safetensors").exists()
    assert not second.exists()

    assert main(arguments) == 0
    done = read_run(first)
    assert done.finished
    assert done.log["step"].is_unique
    assert done.rollouts == 200 / 2 * 16
    assert read_run(second).rollouts == read_run(second).log["step"].iloc[-1] / 2 * (16 + 8)
    record = json.loads((second / "run.json").read_text())
    assert record["compared"]["num_generations"] == 2
    assert record["versions"]["trl"]
    assert "Runs: 2, settings: 2, 1,584 rollouts each" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "2 of them finished" in capsys.readouterr().out
