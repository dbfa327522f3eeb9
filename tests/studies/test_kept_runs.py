"""Stored runs, the folders that a study writes to, and what measuring costs."""

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from studies import runs as study_runs
from studies.runs import Planned, kept, kept_runs, origins, placed, restore, study_parser
from studies.training import Measured, measured_training


def burn(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_what_measuring_costs_is_not_counted():
    trainer = SimpleNamespace(model=torch.nn.Linear(1, 1), spending=SimpleNamespace(drawn=(0, 0)))
    measured = Measured(trainer, lambda model: burn(0.3) or {"set": 1.0}, every=1)
    measured.on_train_begin(None, None, None)
    for step in (1, 2):
        burn(0.1)
        trainer.spending.drawn = (8 * step, 0)
        measured.on_step_end(None, SimpleNamespace(global_step=step), None)
    assert [point.responses for point in measured.points] == [0, 8, 16]
    assert [point.cpu for point in measured.points] == pytest.approx([0, 0.1, 0.2], abs=0.05)


def test_a_run_that_a_signal_stops_is_not_kept():
    def train():
        trainer.stop_on_signal.stopped = True

    trainer = SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        spending=SimpleNamespace(drawn=(0, 0)),
        stop_on_signal=SimpleNamespace(stopped=False),
        remove_callback=lambda _: None,
        add_callback=lambda _: None,
        train=train,
    )
    with pytest.raises(SystemExit, match="signal"):
        measured_training(trainer, lambda model: {}, 1)


def test_a_kept_run_is_not_made_again_and_other_settings_are_refused(tmp_path):
    file = tmp_path / "folder" / "run.json"
    assert kept(file, {"a": (1, 2)}, None) == (None, False)
    assert kept(file, {"a": (1, 2)}, lambda: {"x": 1}) == ({"x": 1}, True)
    assert kept(file, {"a": (1, 2)}, lambda: {"x": 2}) == ({"x": 1}, False)
    with pytest.raises(SystemExit, match="other settings"):
        kept(file, {"a": (1, 3)}, lambda: {"x": 2})


def test_a_kept_run_says_where_it_was_made_and_one_of_before_that_is_read_too(tmp_path, monkeypatch):
    files = [tmp_path / f"{name}.json" for name in "abcd"]
    dates = iter(["Monday", "Monday", "Tuesday"])
    monkeypatch.setattr(study_runs, "machine", lambda: {"date": next(dates)})
    for file in files[:3]:
        assert kept(file, {"a": 1}, lambda: {"x": 1}) == ({"x": 1}, True)
    files[3].write_text(json.dumps({"settings": {"a": 1}, "x": 1}))
    assert [kept(file, {"a": 1}, None) for file in files] == [({"x": 1}, False)] * 4
    assert origins(files) == [{"date": "Monday"}, {"date": "Tuesday"}, None]


def test_only_the_whole_study_goes_to_the_results_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parser = study_parser("A study.", "study")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    whole = parser.parse_args([])

    def results(*words):
        options = placed(parser.parse_args(words), whole)
        return options.results, options.output

    runs = Path("runs/study")
    assert results() == results("--seeds", "0", "1") == (study_runs.RESULTS, runs)
    assert results("--output", str(tmp_path)) == (study_runs.RESULTS, tmp_path)
    assert results("--seeds", "0") == (runs, runs)
    assert results("--seeds", "0", "--results", str(tmp_path)) == (tmp_path, runs)
    folder, output = results("--quick")
    assert folder == output
    assert not {folder, folder.parent} & {runs, study_runs.RESULTS}


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
    assert runs == [{"row": "a", "x": 2, "made": 0}, {"row": "b", "x": 1, "made": 0}]
    assert (made, told["missing"]) == (["b", "a"], 1)
    runs, told = kept_runs(everything)
    assert [run["row"] for run in runs] == ["a", "b", "c"]
    assert (made, told["missing"], len(told["runs made"])) == (["b", "a", "c"], 0, 1)


def test_runs_come_back_from_the_results_of_the_same_settings(tmp_path):
    """A folder of runs that is gone; not where scale or labels differ, and not over a file that is there."""

    def plan(folder, seed, **scale):
        labels = {"row": "none", "seed": seed}
        made = {"accuracy": [0.1, seed / 10]}
        return Planned(labels, folder / f"seed{seed}.json", {**scale, **labels}, lambda: made)

    before = [plan(tmp_path / "old", seed, budget=64) for seed in (0, 1)]
    runs, told = kept_runs(before)
    results = tmp_path / "study.json"
    results.write_text(json.dumps({**told, "scale": {"budget": 64}, "runs": runs}))

    def never():
        raise AssertionError("made again")

    after = [dataclasses.replace(plan(tmp_path / "new", seed, budget=64), make=never) for seed in (0, 1)]
    assert restore(after, results) == 2
    again, told_again = kept_runs(after)
    assert again == runs
    assert told_again["runs made"] == told["runs made"]
    assert restore(after, results) == 0
    assert restore([plan(tmp_path / "other", 0, budget=128), plan(tmp_path / "other", 2, budget=64)], results) == 0
    assert restore(after, tmp_path / "nothing.json") == 0


def test_runs_that_come_back_keep_the_place_where_they_were_made(tmp_path, monkeypatch):
    """Each its own, also where the results are of several machines; of older results what all machines share."""
    dates = iter(["Monday", "Tuesday"])
    monkeypatch.setattr(study_runs, "machine", lambda: {"date": next(dates), "cpu": "Z80"})

    def plan(folder, seed):
        return Planned({"seed": seed}, folder / f"seed{seed}.json", {"seed": seed}, lambda: {"x": seed})

    runs, told = kept_runs([plan(tmp_path / "old", seed) for seed in (0, 1)])
    assert [told["runs made"][run["made"]]["date"] for run in runs] == ["Monday", "Tuesday"]
    results = tmp_path / "study.json"
    results.write_text(json.dumps({**told, "scale": {}, "runs": runs}))
    after = [plan(tmp_path / "new", seed) for seed in (1, 0)]
    assert restore(after, results) == 2
    again, told_again = kept_runs(after)
    assert [told_again["runs made"][run["made"]]["date"] for run in again] == ["Tuesday", "Monday"]
    older = [{key: value for key, value in run.items() if key != "made"} for run in runs]
    results.write_text(json.dumps({**told, "scale": {}, "runs": older}))
    assert restore([plan(tmp_path / "newer", 0)], results) == 1
    assert kept_runs([plan(tmp_path / "newer", 0)])[1]["runs made"] == [{"cpu": "Z80"}]
