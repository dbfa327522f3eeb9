"""The clock study: crossings against the plain rule, every row trains, and a stopped run goes on with its clock."""

import itertools
import json
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from studies.clock import run, study, warm
from studies.clock.tasks import TASKS, WRITTEN_TEXT, written_rows, written_solution


@pytest.mark.parametrize("level", [0.1, 0.25, 0.4, 0.6])
def test_a_crossing_is_the_first_mean_of_three_at_the_level(level):
    accuracy = [0.0, 0.3, 0.1, 0.3, 0.5, 0.4, 0.6]
    times = [10.0 * i for i in range(len(accuracy))]
    means = {times[i]: fmean(accuracy[i - 2 : i + 1]) for i in range(2, len(accuracy))}
    expected = next((when for when, mean in means.items() if round(mean, 9) >= level), None)
    assert study.crossing(times, accuracy, level) == expected


def test_tasks_hold_out_other_problems_than_they_train_on(tmp_path):
    for part in ("train", "test"):
        lines = [json.dumps({"question": f"{part} {i}?", "answer": f"so\n#### {i},000"}) for i in range(20)]
        (tmp_path / f"gsm8k_{part}.jsonl").write_text("\n".join(lines))
    for name, make in TASKS.items():
        task = make(15, 6, tmp_path)
        held_out = {row["prompt"][0]["content"] for row in task.held_out}
        assert len(held_out) == 6, name
        assert not held_out & {row[0]["content"] for row in task.train["prompt"]}, name
        golds = [row["solution"] for row in task.held_out]
        assert task.reward([f"3 no, so it is {gold}." for gold in golds], golds) == [1.0] * 6
        assert task.reward([f"It is {gold}, not 77,777" for gold in golds], golds) == [0.0] * 6


@pytest.mark.parametrize(("left", "right"), [(47, 6), (47, 36), (60, 20), (305, 40), (999, 999)])
def test_a_product_is_written_out_by_true_equations(left, right):
    lines = [line.split("=") for line in written_solution(left, right).split(", ")]
    assert all(eval(term) == int(result) for term, result in lines)
    assert int(lines[-1][1]) == left * right
    # No factor has more than one digit that is not 0: every step is one that a small model can learn.
    factors = [factor for term, _ in lines for factor in term.split("*") if "*" in term]
    assert all(len(factor.rstrip("0")) == 1 for factor in factors)


def test_the_model_of_written_products_has_seen_none_of_the_studys():
    found = warm.examples(500)
    asked = {row["prompt"] for row in written_rows(warm.STUDY_ROWS)}
    questions = {each["prompt"][0]["content"] for each in found}
    assert len(questions) == len(found) > 400
    assert not questions & asked
    pairs = [tuple(map(int, question[8:-1].split(" * "))) for question in questions]
    assert questions == {WRITTEN_TEXT.format(*pair) for pair in pairs}


def settings(steps):
    return {
        "seed": 0, "max_steps": steps, "learning_rate": 1e-3, "bf16": False, "save_steps": 1,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    }  # fmt: skip


def plan(folder, model, row, steps=2):
    folder.mkdir(exist_ok=True)
    file = folder / "plan.json"
    given = {"row": row, "task": "arithmetic", "model": model, "data": "unused", "problems": 30, "held_out": 10}
    given |= {"every": 1, "threads": 1, "folder": str(folder), "settings": settings(steps)}
    file.write_text(json.dumps(given))
    return [str(file)]


@pytest.mark.parametrize("row", [row for row in run.ROWS if "vLLM" not in row])
def test_every_row_trains(row, tiny_path, tmp_path):
    with pytest.raises(SystemExit) as ended:
        run.main(plan(tmp_path, str(tiny_path), row))
    assert ended.value.code == 0
    points = json.loads((tmp_path / "points.json").read_text())
    assert [point["step"] for point in points] == [0, 1, 2]
    assert all(later["cpu"] > earlier["cpu"] for earlier, later in itertools.pairwise(points))
    assert set(points[0]["accuracy"]) == {"all", "easy", "learnable", "out of reach"}


@pytest.mark.parametrize("row", ["TRL", "basis_history, frontier"])
def test_a_stopped_run_goes_on_with_its_clock(row, tiny_path, tmp_path):
    with pytest.raises(SystemExit):
        run.main(plan(tmp_path, str(tiny_path), row, steps=1))
    first = json.loads((tmp_path / "points.json").read_text())
    # Seconds that only the stopped run can know.
    first[-1]["wall"] += 1_000
    # A measurement after the last checkpoint belongs to work that was lost.
    lost = {**first[-1], "step": 2, "wall": 5_000}
    (tmp_path / "points.json").write_text(json.dumps([*first, lost]))
    with pytest.raises(SystemExit) as ended:
        run.main(plan(tmp_path, str(tiny_path), row, steps=3))
    assert ended.value.code == 0
    points = json.loads((tmp_path / "points.json").read_text())
    assert [point["step"] for point in points] == [0, 1, 2, 3]
    assert points[:2] == first
    assert 1_000 < points[2]["wall"] < points[3]["wall"] < 2_000


@pytest.mark.long
def test_a_model_is_warmed_and_can_be_loaded(tiny_path, tmp_path):
    warm.main([str(tiny_path), str(tmp_path), "--quick"])
    first = AutoModelForCausalLM.from_pretrained(tiny_path).state_dict()
    warmed = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert first.keys() == warmed.keys()
    assert any(not torch.equal(first[name], warmed[name]) for name in first)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


@pytest.mark.long
def test_the_whole_study_in_a_few_steps_repeats_nothing(tiny_path, tmp_path, capfd):
    words = ["--quick", "--model", str(tiny_path), "--rows", "TRL", "none", "--output", str(tmp_path)]
    runs = study.main(words)
    assert [each["row"] for each in runs] == ["TRL", "none"]
    assert all(each["step"] == [0, 1, 2, 3, 4] for each in runs)
    lines = study.summary(runs)
    # The level is TRL's own, so it is reached by TRL's trainer, at its own time.
    assert lines[0]["cpu"] == lines[0]["step"] == 1.0
    assert (tmp_path / "clock_study.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "clock_study.json").is_file()
    capfd.readouterr()
    assert study.main(words) == runs
    assert "minutes:" not in capfd.readouterr().out
