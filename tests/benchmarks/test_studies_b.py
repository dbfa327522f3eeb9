"""The studies of trained policies and of cost: their analysis against plain computation, and that each runs."""

import argparse
import itertools
import json
import math
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from basis_rl.baselines import BASELINES
from basis_rl.functional.tilt import beta_grid
from basis_rl.recipe.file import parse_recipe
from benchmarks import (
    advantage_cost,
    common,
    gpu_step,
    knights,
    policy_report,
    policy_study,
    reinforce_pp_study,
    worked_sums,
)
from benchmarks.common import kept, origins, placed, places
from benchmarks.small_policy import problems
from benchmarks.training import Measured, StepClock, measured_training, quickstart_model


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def curve(seed, points=12):
    rng = np.random.default_rng(seed)
    return (np.arange(points) * 64.0).tolist(), np.clip(0.5 + np.cumsum(rng.normal(0.01, 0.05, points)), 0, 1).tolist()


@pytest.mark.parametrize("last", [1, 3, 20])
def test_levels_are_trailing_means(last):
    _, accuracy = curve(0)
    for i, level in enumerate(policy_report.levels(accuracy, last)):
        before = [accuracy[j] for j in range(len(accuracy)) if i - last < j <= i]
        assert level == pytest.approx(sum(before) / len(before))


@pytest.mark.parametrize("seed", range(8))
def test_spent_until_is_where_the_level_is_first_reached(seed):
    spent, accuracy = curve(seed)
    held = policy_report.levels(accuracy)
    level = (max(held) + held[0]) / 2
    found = policy_report.spent_until(spent, accuracy, level)
    assert np.interp(found, spent, held) == pytest.approx(level)
    fine = np.linspace(0, found * (1 - 1e-9), 5000)[:-1]
    assert (np.interp(fine, spent, held) < level).all() or found == spent[0]
    assert policy_report.spent_until(spent, accuracy, max(held) + 1e-9) is None
    assert policy_report.spent_until(spent, accuracy, held[0]) == spent[0]


def test_a_fall_from_the_maximum_is_a_collapse_and_a_rise_is_not():
    assert policy_report.collapsed([0.5, 0.8, 0.8, 0.8, 0.8, 0.6, 0.6, 0.6, 0.6])
    assert not policy_report.collapsed([0.2, 0.4, 0.6, 0.8, 0.9])
    assert not policy_report.collapsed([0.8] * 4 + [0.1] + [0.8] * 4, last=4)  # one measurement is none


def policy_run(row, seed, accuracy):
    spent = [float(i) for i in range(len(accuracy))]
    return {"objective": "grpo", "row": row, "seed": seed, "learning_rate": 1e-4,
            "accuracy": accuracy, "responses": spent, "cpu": spent,
            "log": {"num_rollouts": [1], "baseline/beta": [2.0]}}  # fmt: skip


def test_summary_compares_runs_of_the_same_seed():
    rises = {0: [0.1] + [0.5] * 9, 1: [0.1] + [0.7] * 9}
    runs = [policy_run("grpo G=8", seed, accuracy) for seed, accuracy in rises.items()]
    table = {"responses": 18, "cpu": 9}
    runs += [{**policy_run("basis", seed, [0.1] + [0.6] * 9), "table": table} for seed in rises]
    groups, basis = policy_report.summary(runs)
    assert groups["final"] == {"median": pytest.approx(0.6), "min": pytest.approx(0.5), "max": pytest.approx(0.7)}
    # Its own trailing mean is at its end from the fifth measurement on.
    assert groups["to_reference"]["median"] == pytest.approx(4 / 9)
    # With seed 0 the trailing mean of four passes 0.5 between two (0.4333 after three) and three (0.475, then 0.6);
    # with seed 1 the reference ends at 0.7, which 0.6 never is.
    held = [0.1, 0.35, 1.3 / 3, 0.475, 0.6]
    share = (3 + (0.5 - held[3]) / (held[4] - held[3])) / 9
    assert basis["to_reference"]["median"] == pytest.approx(share)
    assert basis["to_reference_with_table"]["median"] == pytest.approx(share + 2)
    assert basis["cpu_to_reference_with_table"]["median"] == pytest.approx(share + 1)
    assert basis["never"] == 1
    assert "never 1" in policy_report.table([groups, basis])


def test_the_best_rate_of_the_reference_is_that_of_its_highest_mean():
    def at(rate, row, seed, final):
        return {**policy_run(row, seed, [0.1] + [final] * 9), "learning_rate": rate}

    runs = [at(1e-4, "grpo G=8", seed, final) for seed, final in ((0, 0.5), (1, 0.9))]
    runs += [at(3e-5, "grpo G=8", seed, final) for seed, final in ((0, 0.8), (1, 0.7))]
    assert policy_report.best_of(runs, "grpo") == 3e-5
    assert policy_report.best_of(runs[:2], "grpo") is None
    runs += [at(1e-4, "basis", seed, 0.75) for seed in (0, 1)]
    basis = policy_report.summary(runs)[-1]
    assert basis["row"] == "basis"
    assert (basis["never"], basis["never_best"]) == (1, 1)  # 0.9 with the second seed; 0.8 with the first
    assert basis["to_best"]["median"] > basis["to_reference"]["median"]


def test_growth_exponent_of_a_power_law():
    sizes = [512, 2048, 65_536]
    assert advantage_cost.growth_exponent(sizes, [3e-6 * n**1.3 for n in sizes]) == pytest.approx(1.3)


def test_peak_bytes_counts_what_lives_at_one_time():
    def two_at_a_time():
        for _ in range(3):
            first = torch.ones(250_000)
            second = torch.ones(250_000)
            del first, second

    assert advantage_cost.peak_bytes(two_at_a_time) == pytest.approx(2e6, rel=0.01)


def test_naive_energies_are_the_equation():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=4, tie_word_embeddings=False)
    )  # fmt: skip
    hidden, tokens = 30 * torch.randn(2, 3, 8), torch.randint(11, (2, 3))
    found = advantage_cost.naive_energies(model, hidden, tokens)
    for b, t in itertools.product(range(2), range(3)):
        weights = [math.exp((hidden[b, t].double() @ row.double()).item()) for row in model.lm_head.weight]
        p = [w / sum(weights) for w in weights]
        assert float(found[b, t]) == pytest.approx(1 - 2 * p[tokens[b, t]] + sum(q * q for q in p), abs=1e-5)


@pytest.mark.parametrize("people", [2, 4])
def test_puzzles_have_the_solution_that_they_are_given_and_no_other(people):
    found = knights.puzzles(people, 30, seed=3)
    assert len({question for question, _ in found}) == len(found)
    for question, solution in found:
        answers = (
            " ".join(person + sign for person, sign in zip(knights.PEOPLE, signs, strict=False))
            for signs in itertools.product("+-", repeat=people)
        )
        assert [answer for answer in answers if knights.is_solution(question, answer)] == [solution]


def test_the_tokenizer_of_puzzles_knows_all_their_words_and_the_reward_its_own_text():
    tokenizer = knights.tokenizer(5)
    for question, solution in knights.puzzles(5, 10, seed=4):
        for text in (question, f"\\boxed{{{solution}}}<|im_end|>"):
            assert tokenizer.convert_tokens_to_ids("[unknown]") not in tokenizer(text)["input_ids"]
        told = tokenizer.decode(tokenizer(f"\\boxed{{{solution}}}<|im_end|>")["input_ids"], skip_special_tokens=True)
        wrong = told.replace("A+", "A?").replace("A-", "A+").replace("A?", "A-")
        assert knights.reward([told, wrong, ""], [solution] * 3) == [1.0, 0.0, 0.0]


def test_no_puzzle_is_both_trained_on_and_measured():
    training, measured = knights.split((2, 3), 40, 20, seed=0)
    for people in (2, 3):
        assert not {q for q, _ in training[people]} & {q for q, _ in measured[people]}
        assert measured[people]


def test_pass_at_k_is_the_mean_over_subsets():
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.0] * 4]
    expected = [max(subset) for row in rewards for subset in itertools.combinations(row, 2)]
    found = reinforce_pp_study.pass_at(rewards, (1, 2))
    assert found == {"pass@1": pytest.approx(3 / 12), "pass@2": pytest.approx(sum(expected) / len(expected))}


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


def test_the_step_clock_has_whole_steps_with_what_follows_the_gradient():
    clock = StepClock(time.process_time)
    for _ in range(3):
        clock.on_step_begin(None, None, None)
        burn(0.1)  # forward and backward
        burn(0.1)  # the optimizer, callbacks
    assert np.diff(clock.began) == pytest.approx([0.2, 0.2], abs=0.05)


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
    monkeypatch.setattr(common, "machine", lambda: {"date": next(dates)})
    for file in files[:3]:
        assert kept(file, {"a": 1}, lambda: {"x": 1}) == ({"x": 1}, True)
    files[3].write_text(json.dumps({"settings": {"a": 1}, "x": 1}))
    assert [kept(file, {"a": 1}, None) for file in files] == [({"x": 1}, False)] * 4
    assert origins(files) == [{"date": "Monday"}, {"date": "Tuesday"}, None]


def test_only_the_whole_study_goes_to_the_results_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    places(parser, "study")
    whole = parser.parse_args([])

    def results(*words):
        options = placed(parser.parse_args(words), whole)
        return options.results, options.output

    runs = Path("runs/study")
    assert results() == results("--seeds", "0", "1") == (common.RESULTS, runs)
    assert results("--output", str(tmp_path)) == (common.RESULTS, tmp_path)
    assert results("--seeds", "0") == (runs, runs)
    assert results("--seeds", "0", "--results", str(tmp_path)) == (tmp_path, runs)
    folder, output = results("--quick")
    assert folder == output
    assert not {folder, folder.parent} & {runs, common.RESULTS}


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


def test_the_worked_policy_is_warm_started_until_its_own_answers_are_right(monkeypatch):
    monkeypatch.setattr(worked_sums, "accuracy", lambda *args: 0.3)
    few = problems(60)
    ended, short, whole = (
        worked_sums.worked_policy(few, 0, until, max_steps=steps, every=2)[0].state_dict()["lm_head.weight"]
        for until, steps in ((0.3, 4), (0.4, 2), (0.4, 4))
    )
    assert torch.equal(ended, short)
    assert not torch.equal(ended, whole)


def test_policy_study_runs_and_goes_on(tmp_path):
    asked = ["--quick", "--output", str(tmp_path), "--seeds", "0", "--objectives", "grpo", "--rates"]
    first = policy_study.main([*asked, "--runs", "1"])
    assert (len(first["runs"]), first["missing"]) == (1, len(policy_study.ROWS) - 1)
    runs = policy_study.main([*asked, "1e-3", "--rows", "basis", "grpo G=8"])["runs"]
    assert [(run["row"], run["learning_rate"]) for run in runs] == [
        ("basis", 1e-4), ("grpo G=8", 1e-4), ("basis", 1e-3), ("grpo G=8", 1e-3)
    ]  # fmt: skip
    assert runs[0]["accuracy"][0] == runs[2]["accuracy"][0]
    asked_for = policy_study.settings(policy_study.Scale(learning_rate=1e-3), "grpo", "basis", 0, tmp_path)
    assert parse_recipe(asked_for).args.learning_rate == 1e-3
    assert (tmp_path / "policy_study_rates.png").read_bytes().startswith(b"\x89PNG")
    runs = policy_study.main(asked)["runs"]
    assert [run["row"] for run in runs] == list(policy_study.ROWS)
    assert runs[0] == first["runs"][0]
    assert len({run["accuracy"][0] for run in runs}) == 1  # one warm start for all
    assert {tuple(run["responses"]) for run in runs} == {(0, 32, 64)}  # as many responses at each measurement
    grid = beta_grid().tolist()
    assert all(min(abs(beta - each) for each in grid) < 1e-5 for beta in runs[0]["log"]["baseline/beta"])
    assert {run["row"] for run in runs if "baseline/beta" in run["log"]} == {"basis", "basis_history"}
    assert (tmp_path / "policy_study.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "policy_study.json").read_text())["missing"] == 0


def test_the_whole_worked_study_has_one_objective():
    whole = policy_study.parse(["--worked"])
    assert policy_study.parse(["--worked", "--objectives", "grpo"]) == whole
    assert (whole.objectives, whole.start, whole.study) == (["grpo"], 0.25, "policy_study_worked")
    assert policy_study.parse([]).objectives == list(policy_study.OBJECTIVES)


def test_reinforce_pp_study_runs(tmp_path):
    results = reinforce_pp_study.main(["--quick", "--output", str(tmp_path), "--seeds", "0"])
    assert results["missing"] == 0
    parts = {part: [run for run in results["runs"] if run["part"] == part] for part in reinforce_pp_study.PARTS}
    for runs in parts.values():
        assert [run["row"] for run in runs] == list(reinforce_pp_study.ROWS)
        for name in runs[0]["accuracy"]:
            assert len({run["accuracy"][name][0] for run in runs}) == 1
    assert set(parts["knights"][0]["accuracy"]) == {"2", "3", "4", "5"}
    assert json.loads((tmp_path / "reinforce_pp_study.json").read_text())["summary"]
    assert (tmp_path / "reinforce_pp_study.png").read_bytes().startswith(b"\x89PNG")


def test_advantage_cost_measures_every_baseline_and_the_fused_head_agrees():
    results = advantage_cost.main(["--quick"])
    assert set(results["baselines"]) == set(BASELINES) - advantage_cost.NEEDS_A_MODEL
    assert results["baselines, memory kept"].keys() == results["baselines"].keys()
    assert results["energies"]["largest_difference"] < 1e-5


def test_gpu_step_runs_without_a_gpu():
    results = gpu_step.main(["--device", "cpu", "--quick"])
    assert results["device"] == "CPU"
    assert set(results["steps"]) == set(gpu_step.SIDES)
    assert not any("out_of_memory" in entry for entry in results["steps"].values())
    assert results["precision"]["fp32 head"]["max"] < results["precision"]["bfloat16 head"]["max"]
