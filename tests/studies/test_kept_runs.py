"""Stored runs, tables, the folders that a study writes to, and what measuring costs."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from studies.runs import Planned, kept, kept_runs, read_table, save_table
from studies.training import Measured
from tests.benchmarks.test_costs import burn


def fake_trainer(**parts):
    return SimpleNamespace(model=torch.nn.Linear(1, 1), spending=SimpleNamespace(drawn=(0, 0)), **parts)


def test_what_measuring_costs_is_not_counted():
    trainer = fake_trainer()
    measured = Measured(trainer, lambda model: burn(0.3) or {"set": 1.0}, every=1)
    measured.on_train_begin(None, None, None)
    for step in (1, 2):
        burn(0.1)
        trainer.spending.drawn = (8 * step, 0)
        measured.on_step_end(None, SimpleNamespace(global_step=step), None)
    assert [point.rollouts for point in measured.points] == [0, 8, 16]
    assert [point.cpu for point in measured.points] == pytest.approx([0, 0.1, 0.2], abs=0.05)


def test_a_kept_run_is_not_made_again_and_other_settings_are_refused(tmp_path):
    file = tmp_path / "folder" / "run.json"
    assert kept(file, {"a": (1, 2)}, None) == (None, False)
    assert kept(file, {"a": (1, 2)}, lambda: {"x": 1}) == ({"x": 1}, True)
    assert kept(file, {"a": (1, 2)}, lambda: {"x": 2}) == ({"x": 1}, False)
    with pytest.raises(SystemExit, match="other settings"):
        kept(file, {"a": (1, 3)}, lambda: {"x": 2})


def test_no_more_runs_are_made_than_asked_for_and_those_that_are_there_count_too(tmp_path):
    made = []

    def planned(name):
        def make():
            made.append(name)
            return {"x": len(made)}

        return Planned({"row": name}, tmp_path / f"{name}.json", {"a": 1}, make)

    everything = [planned(name) for name in "abc"]
    kept_runs(everything[1:2])
    runs, told = kept_runs(everything, at_most=1)
    assert runs == [{"row": "a", "x": 2}, {"row": "b", "x": 1}]
    assert (made, told["missing"]) == (["b", "a"], 1)
    runs, told = kept_runs(everything)
    assert [run["row"] for run in runs] == ["a", "b", "c"]
    assert (made, told["missing"], len(told["runs made"])) == (["b", "a", "c"], 0, 1)


def test_a_table_has_a_line_for_each_row_and_is_read_as_it_was_saved(tmp_path):
    rows = [
        {"row": "a, b", "curve": [0.12345678, 2], "cost": {"cpu": math.nan}},
        {"row": "c", "curve": [], "cost": None},
    ]
    save_table("study", {"scale": {"budget": 64}}, rows, tmp_path)
    facts, found = read_table(tmp_path / "study.json")
    assert (facts["scale"], "cpu" in facts) == ({"budget": 64}, True)
    assert found == [{**rows[0], "curve": [0.123457, 2], "cost": {"cpu": None}}, rows[1]]
    lines = (tmp_path / "study.json").read_text().splitlines()
    assert [json.loads(line.strip(" ,"))[0] for line in lines if line.startswith("  [")] == ["a, b", "c"]
    save_table("none", {}, [], tmp_path)
    assert read_table(tmp_path / "none.json")[1] == []
