"""The main job on real input: one rollout per prompt, and the model really learns, with each of three seeds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from basis_rl.values import ValueTable
from examples.quickstart import run

ROOT = Path(__file__).resolve().parents[1]


def assert_complete(folder, rollouts):
    """All phases have left what they are for; returns the summary."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rollouts_per_prompt"] == 1
    assert summary["rollouts"] == rollouts
    assert {"warm_start", "value_table", "training", "evaluation", "total"} <= set(summary["seconds"])
    assert {"torch", "trl", "transformers"} <= set(summary["versions"])
    assert AutoModelForCausalLM.from_pretrained(folder / "basis").config.model_type == "qwen3"
    assert (folder / "basis" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "history" / "training.png").read_bytes().startswith(b"\x89PNG")
    drawn = [json.loads(line) for line in (folder / "history" / "metrics.jsonl").open()]
    coverage = [row["sampler/coverage"] for row in drawn if "sampler/coverage" in row]
    assert 0 < coverage[0] < coverage[-1] <= 1
    betas = [json.loads(line).get("baseline/beta") for line in (folder / "basis" / "metrics.jsonl").open()]
    assert all(0.01 <= beta <= 5 for beta in betas if beta is not None)
    assert any(beta is not None for beta in betas)
    return summary


def test_settings_of_the_first_baseline_are_not_the_seconds():
    words = ["--baseline_kwargs.weighting", "vop", "--max_steps=4", "--reward_weights", "1", "2", "--baseline=basis"]
    assert run.pairs(words) == [words[:2], ["--max_steps=4"], words[3:6], words[6:]]
    assert run.pairs([]) == []


@pytest.mark.long
def test_all_phases_in_twenty_steps(tmp_path, monkeypatch, capsys):
    arguments = ["--output_dir", str(tmp_path), "--max_warm_start_steps", "30", "--max_steps", "20"]
    arguments += ["--dataset_kwargs.size", "400", "--values_num_rollouts", "2", "--values_batch_size", "128"]
    arguments += ["--per_device_train_batch_size", "16", "--eval_steps", "10"]
    arguments += ["--baseline_kwargs.weighting", "vop"]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    run.main()
    summary = assert_complete(tmp_path, rollouts=20 // 2 * 32)
    said = capsys.readouterr().out
    assert all(f"[{phase}/7]" in said for phase in range(1, 8))
    assert "after 30 steps" in said
    built = json.loads((tmp_path / "values" / "metadata.json").read_text())["provenance"]
    assert summary["rollouts_value_table"] == built["rollouts"] == 2 * len(ValueTable.load(tmp_path / "values"))
    assert 0 <= summary["accuracy_before"] < 0.5
    evaluated = [json.loads(line) for line in (tmp_path / "basis" / "metrics.jsonl").open()]
    assert sum("eval_reward" in row for row in evaluated) == 2


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_held_out_accuracy_rises_by_15_points(seed, tmp_path):
    # A process of its own, as a user starts it, but with the tests' one thread: two of them would wait for each other
    # where another test has the second core.
    command = [sys.executable, "-m", "examples.quickstart.run", "--seed", str(seed), "--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    summary = assert_complete(tmp_path, rollouts=120 * 512)
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.15
    assert summary["accuracy_after_history"] - summary["accuracy_before"] >= 0.15
