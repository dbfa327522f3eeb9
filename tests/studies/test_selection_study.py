"""The selection study's task and report: what a rollout earns, who is held out, and rollouts until a level."""

import random
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest

from studies.selection import report, study, task
from studies.selection.task import KINDS, NOTHING, TASKS, TOKENS


@pytest.mark.parametrize("family", ["easy", "hard", "alike"])
def test_a_demonstration_earns_the_reward_with_the_strategies_that_its_kind_needs_and_no_others(family, monkeypatch):
    monkeypatch.setattr(task, "MISTAKE", 0.0)
    rng = random.Random(0)
    kinds = {**TASKS["mixed"].kinds, **TASKS["alike"].kinds}[family]
    for kind in kinds:
        for strategies in product(range(task.STRATEGIES), repeat=task.PARTS):
            made = task.problem([kind], rng)
            (earned,) = task.reward([task.demonstration(made, rng, strategies)], [made.solution])
            right = all(need in (None, s) for s, need in zip(strategies, KINDS[kind].needs, strict=True))
            assert earned == right, (kind, strategies)


def test_nothing_that_can_be_written_solves_an_impossible_prompt():
    vocabulary = [*task.build_tokenizer().get_vocab()]
    assert NOTHING not in vocabulary
    texts = ["", "=", *(f"= {word}" for word in vocabulary), *(f"= {a} {b}" for a, b in product(range(10), repeat=2))]
    assert not any(task.reward(texts, [NOTHING] * len(texts)))


def test_prompts_are_in_their_shares_and_none_is_both_trained_on_and_held_out():
    trained, held_out = task.datasets(TASKS["mixed"], 1000, 150)
    assert Counter(trained["family"]) == {"easy": 660, "hard": 190, "impossible": 150}
    prompts = [*trained["prompt"], *(prompt for part in held_out.values() for prompt in part["prompt"])]
    assert len(set(prompts)) == len(prompts) == 1000 + 2 * 150
    assert len(set(trained["prompt_id"])) == 1000
    kinds = {family: set(TASKS["mixed"].kinds[family]) for family in held_out}
    kinds["impossible"] = kinds["easy"] | kinds["hard"]  # nothing in the text tells them
    for family, solvable in kinds.items():
        rows = [row for part in (trained, *held_out.values()) for row in part if row["family"] == family]
        assert {row["prompt"].split()[0] for row in rows} == solvable
        assert {row["solution"] == NOTHING for row in rows} == {family == "impossible"}
    assert task.datasets(TASKS["mixed"], 1000, 150)[0]["prompt"] == trained["prompt"]
    alike, sets = task.datasets(TASKS["alike"], 100, 20)
    assert (set(alike["family"]), [*sets]) == ({"alike"}, ["alike"])


def test_prompts_and_rollouts_are_of_one_length_and_known_words():
    tokenizer, rng = task.build_tokenizer(), random.Random(1)
    for kind in KINDS:
        made = task.problem([kind], rng)
        shown = f"{task.demonstration(made, rng)} {task.END}"
        assert len(tokenizer(made.prompt)["input_ids"]) == 9
        ids = tokenizer(shown)["input_ids"]
        assert len(ids) == TOKENS
        assert tokenizer.pad_token_id not in ids
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert task.reward([text], [shown.rsplit("= ", 1)[1].removesuffix(f" {task.END}")]) == [1.0]


def fake_runs(row, rate, accuracies, sampler="uniform"):
    """A run per accuracy curve; the seeds count up."""
    rollouts = [100 * i for i in range(11)]
    shared = {"row": row, "sampler": sampler, "learning_rate": rate, "rollouts": rollouts, "cpu": 1.0, "entropy": 0.5}
    shared["drawn"] = {"easy": 3 * rollouts[-1], "hard": rollouts[-1]}
    curves = [{"hard": accuracy, "pass@8 hard": accuracy, "easy": accuracy} for accuracy in accuracies]
    return [{**shared, "seed": seed, "scores": scores} for seed, scores in enumerate(curves)]


def rising(end, steps, points=11):
    """0 up to `end`, which is reached after `steps` measurements and kept."""
    return [end * min(1.0, i / steps) for i in range(points)]


def test_each_row_is_judged_at_its_own_best_rate_against_the_best_level_of_groups():
    groups = report.REFERENCE
    runs = fake_runs(groups, 1e-3, [rising(0.8, 8)] * 3)
    runs += fake_runs(groups, 3e-3, [rising(0.5, 2)] * 3)  # fast, but it ends lower
    runs += fake_runs("basis_history", 1e-3, [rising(0.8, 8)] * 3, "frontier")
    runs += fake_runs("basis_history", 3e-3, [rising(0.8, k) for k in (4, 4, 5)], "frontier")
    runs += fake_runs("none", 1e-3, [rising(0.3, 8)]) + fake_runs("none", 3e-3, [rising(0.4, 8)])
    assert report.reference_level(runs, "hard") == pytest.approx(0.8)
    lines = {(line["row"], line["learning_rate"]): line for line in report.summary(runs, "hard")}
    best = {key for key, line in lines.items() if line["best"]}
    assert best == {(groups, 1e-3), ("basis_history", 3e-3), ("none", 3e-3)}
    # A line of slope 0.1 per hundred rollouts, held by the mean of two measurements half a hundred later.
    half = lines[groups, 1e-3]["to"]["0.5"]
    assert half["median"] == pytest.approx(450)
    assert lines["basis_history", 3e-3]["to"]["0.5"]["median"] == pytest.approx(250)
    assert lines["basis_history", 3e-3]["to"]["0.5"]["max"] == pytest.approx(300)
    never = lines["none", 3e-3]["to"]["0.9"]
    assert (never["median"], never["never"], never["seeds"]) == (None, 1, [None])
    assert lines["none", 3e-3]["drawn"] == pytest.approx({"easy": 0.75, "hard": 0.25})
    assert lines["none", 3e-3]["entropy"]["median"] == 0.5
    shown = report.table([*lines.values()]).splitlines()
    assert sum("**" in line for line in shown) == 3
    assert len({line.count("|") for line in shown}) == 1  # every line of the Markdown table has all columns
    assert report.table([]) == "no runs yet"
    (alone,) = report.summary(runs[-1:], "hard")  # without groups there are no levels
    assert (alone["best"], alone["to"]) == (True, {})


def test_a_run_is_measured_by_rollouts_and_ends_with_its_budget():
    trainer = SimpleNamespace(model=SimpleNamespace(train=lambda: None), spending=SimpleNamespace(drawn=(0, 0)))
    measured = study.MeasuredToTheBudget(trainer, lambda model: {"hard": 0.5}, every=100, budget=400)
    control = SimpleNamespace(should_training_stop=False)
    measured.on_train_begin()
    stopped = None
    for step, drawn in enumerate((64, 128, 192, 330, 390, 450), start=1):  # a refill draws more than a batch
        trainer.spending.drawn = (drawn, 0)
        measured.on_step_end(None, SimpleNamespace(global_step=step), control)
        if control.should_training_stop and stopped is None:
            stopped = drawn
    assert [point.rollouts for point in measured.points] == [0, 128, 330, 450]
    assert stopped == 450


def test_rows_are_judged_at_one_rate_each_by_seeds_that_chose_nothing(tmp_path):
    options = study.parse(["--judge"])
    options.output = tmp_path
    rates = {}
    for plan in study.planned(study.Scale(), options):
        rates.setdefault((plan.labels["row"], plan.labels["sampler"]), []).append(plan.labels["learning_rate"])
        assert plan.labels["seed"] in study.FURTHER_SEEDS
    assert list(rates) == list(study.PAIRS["judge"])
    assert all(len(found) == len(study.FURTHER_SEEDS) and len({*found}) == 1 for found in rates.values())
    assert rates["basis_history, optimal", "frontier"][0] == 6e-4
