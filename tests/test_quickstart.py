"""The main job on real input: one rollout per prompt, and the model really learns, with each of three seeds."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from basis_rl.cli.main import main as basis_rl
from examples.quickstart import run

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--dataset_kwargs.size", "400", "--per_device_train_batch_size", "16"]


def assert_complete(folder, rollouts):
    """All phases have left what they are for; returns the summary."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rollouts"] == rollouts
    assert {"warm_start", "history", "grpo", "total"} == set(summary["seconds"])
    assert {"torch", "trl", "transformers"} <= set(summary["versions"])
    first, second = (list(summary["accuracy"][name].values()) for name in ("history", "grpo"))
    assert first[0] == second[0], "the accuracy of one model is one number"
    assert len(first) == len(second) == 3
    logs = {}
    for name, each in (("history", 1), ("grpo", 8)):
        assert AutoModelForCausalLM.from_pretrained(folder / name).config.model_type == "qwen3"
        assert (folder / name / "training.png").read_bytes().startswith(b"\x89PNG")
        logs[name] = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
        # Both sides really have as many rollouts as the table says.
        assert max(row.get("num_rollouts", 0) for row in logs[name]) == rollouts
        assert f"num_generations: {each}\n" in (folder / name / "recipe.yaml").read_text()
    coverage = [row["sampler/coverage"] for row in logs["history"] if "sampler/coverage" in row]
    assert 0 < coverage[0] < coverage[-1] <= 1
    return summary


def test_settings_of_the_advantage_are_only_for_the_first():
    words = ["--baseline_kwargs.lcb", "2", "--max_steps=4", "--reward_weights", "1", "2", "--baseline=basis"]
    assert run.pairs(words) == [words[:2], ["--max_steps=4"], words[3:6], words[6:]]
    assert run.pairs([]) == []


@pytest.mark.long
def test_all_phases_in_twenty_steps(tmp_path, monkeypatch, capsys):
    arguments = ["--output_dir", str(tmp_path), "--max_warm_start_steps", "30", "--max_steps", "20", *SMALL]
    arguments += ["--baseline_kwargs.lcb", "2"]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    monkeypatch.chdir(ROOT)
    run.main()
    summary = assert_complete(tmp_path, rollouts=20 // 2 * 32)
    assert 0 <= summary["accuracy"]["history"]["0"] < 0.5
    said = capsys.readouterr().out
    assert all(f"[{phase}/3]" in said for phase in range(1, 4))
    assert "for 30 steps" in said
    last = said[said.rindex("Accuracy:") :]
    assert "{" not in last
    # Everything that it suggests works.
    steps = [shlex.split(line, comments=True) for line in last.partition("Next:")[2].splitlines() if "basis-rl" in line]
    assert [command for _, command, *_ in steps] == ["compare", "values", "train"]
    for _, command, *rest in steps:
        few = [] if command == "compare" else [*SMALL, "--values_num_rollouts", "2", "--max_steps", "4"]
        assert basis_rl([command, *rest, *few]) == 0, command
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "basis").config.model_type == "qwen3"
    # A second call begins anew.
    again = run.run(0, tmp_path, ["--max_steps", "4", *SMALL], 3)
    assert again["rollouts"] == 4 // 2 * 32
    assert (tmp_path / "history" / "previous-1" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_held_out_accuracy_rises_by_15_points(seed, tmp_path):
    # A process of its own, as a user starts it, but with the tests' one thread: two of them would wait for each other
    # where another test has the second core.
    command = [sys.executable, "-m", "examples.quickstart.run", "--seed", str(seed), "--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    accuracy = assert_complete(tmp_path, rollouts=100 * 128)["accuracy"]
    assert accuracy["history"]["200"] - accuracy["history"]["0"] >= 0.15
    assert accuracy["history"]["200"] > accuracy["grpo"]["200"]
