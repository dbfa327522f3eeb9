"""The bottom line in words agrees with the differences in the table, and claims nothing that the seeds do not show."""

import pytest

from basis_rl.report.compare import compare_runs
from basis_rl.report.page import html, markdown
from basis_rl.report.tables import final_table
from basis_rl.report.verdict import verdict
from tests.report.folders import write_rows, write_run


@pytest.fixture
def runs(tmp_path):
    """Writes a run for each level; its reward is that level in every step, so that its seeds are what is given."""

    def write(evaluate=False, table=None, recipe=None, **levels):
        for name, values in levels.items():
            for seed, level in enumerate(values):
                folder = tmp_path / f"{name}-{seed}"
                shared = {"baseline": name, "seed": seed, "table": table if name == "basis" else None}
                rows = write_run(folder, **shared, recipe=(recipe or {}).get(name))
                for row in rows:
                    row["reward"] = level
                    if evaluate and row["step"] % 5 == 0:
                        row["eval_reward"] = 1 - level
                write_rows(folder, rows)
        return compare_runs([tmp_path])

    return write


WIDE = {"rloo": [0.60, 0.62], "grpo": [0.40, 0.42], "opo": [0.50, 0.52]}
CLOSE = {"rloo": [0.5, 0.7], "grpo": [0.6, 0.5], "opo": [0.1, 0.3]}
SINGLE = {"rloo": [0.7], "grpo": [0.6], "opo": [0.5]}
THIRD = {"rloo": [0.60, 0.61, 0.62], "grpo": [0.50, 0.51, 0.53], "opo": [0.2, 0.8, 0.4]}
LEVELS = {
    "'rloo' is ahead. | highest final training reward after 1,280 rollouts, 0.610 ± 0.014": WIDE,
    "ahead of 'opo' (0.510 ± 0.014, difference +0.100 [+0.100, +0.100]) | 'grpo' (0.410 ± 0.014, difference +0.2": WIDE,
    "No verdict: the seeds do not show whether 'rloo' or 'grpo' is ahead | +0.050 [−1.856, +1.956]": CLOSE,
    "It is ahead of 'opo' (0.200 ± 0.141, difference +0.400 [+0.400, +0.400])": CLOSE,
    "No verdict: one seed | certain to be ahead of 'grpo' (0.600, difference +0.100), 'opo' (": SINGLE,
    "No verdict: the seeds do not show whether 'rloo' or 'opo' is ahead. | It is ahead of 'grpo' (": THIRD,
    "95 % interval by itself, and 'rloo' was chosen as the best of 3 settings by these same seeds. Confirm": WIDE,
    "No verdict: the seeds do not show": {"rloo": [0.5, 0.7], "grpo": [0.5, 0.7]},
    "'grpo' is ahead. | 'grpo' has the highest evaluation reward": {"evaluate": True, **WIDE, "opo": [0.9, 0.92]},
}


@pytest.mark.parametrize("said", LEVELS)
def test_who_is_ahead_and_by_how_much(said, runs):
    told = " ".join(verdict(runs(**LEVELS[said])))
    assert [words for words in said.split(" | ") if words not in told] == []


def test_of_two_settings_the_interval_is_what_it_says(runs):
    assert "by itself" not in " ".join(verdict(runs(rloo=[0.60, 0.62], grpo=[0.40, 0.42])))


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize(
    "drawn",
    [
        {"opo": {"prompt_sampler": "frontier"}},
        {"rloo": {"prompt_sampler": "frontier"}, "opo": {"prompt_sampler": "frontier"}},
        {"rloo": {"max_generations": 24}},
    ],
    ids=["sampler", "one sampler with two beliefs", "max_generations"],
)
def test_rewards_of_other_prompts_are_not_compared(drawn, evaluate, runs):
    first, *others = verdict(runs(recipe=drawn, evaluate=evaluate, rloo=[0.4, 0.42], opo=[0.60, 0.62]))
    assert (first == "'rloo' is ahead.") == evaluate
    assert evaluate or first.startswith("No verdict: prompt_sampler or max_generations chooses")
    assert ("ahead of" in " ".join(others)) == evaluate


def test_the_default_sampler_may_be_named(runs):
    drawn = {"opo": {"prompt_sampler": "uniform"}}
    assert verdict(runs(recipe=drawn, rloo=[0.4, 0.42], opo=[0.60, 0.62]))[0] == "'opo' is ahead."


def evaluated(folder, baseline, seed, per_step, *steps, **settings):
    """A run with evaluations after these steps, whose results are the ten-thousandth part of its rollouts."""
    rows = write_run(folder / f"{baseline}-{seed}", baseline=baseline, seed=seed, per_step=per_step, **settings)
    first = {"step": 0, "num_rollouts": 0}
    for row in (found := [first, *rows]):
        if row["step"] in steps:
            row["eval_avg@1"] = row["num_rollouts"] / 10_000
    write_rows(folder / f"{baseline}-{seed}", found)


def test_evaluations_after_other_numbers_of_rollouts_are_compared_at_one(tmp_path):
    """The quickstart's sweep: one learning curve, evaluated in the middle and at the end of unequally long runs."""
    for seed in (0, 1, 2):
        evaluated(tmp_path, "grpo", seed, 64, 50, 100, steps=100)
        evaluated(tmp_path, "remax", seed, 72, 44, 88, steps=88)
    found = compare_runs([tmp_path])
    first, highest, *_ = verdict(found)
    assert first.startswith("No verdict: the seeds do not show")
    assert "highest evaluation (avg@1) after 6,336 rollouts, 0.634" in highest
    assert {row.cells[2] for row in final_table(found).rows if row.group is not None} == {"0.634"}
    assert "Evaluations are compared at 6,336 rollouts" in final_table(found).caption
    evaluated(tmp_path, "rloo", 0, 70, 50, steps=100)
    found = compare_runs([tmp_path])
    assert "evaluation (avg@1) after 3,500 rollouts, 0.350" in verdict(found)[1]
    assert any("Evaluations are compared after 3,500 of the 6,336 rollouts" in note for note in found.notes)


def test_an_evaluation_before_training_ranks_nothing(tmp_path):
    for baseline, steps in (("grpo", 100), ("rloo", 100), ("opo", 30)):
        evaluated(tmp_path, baseline, 0, 64, 0, 50, 100, steps=steps)
    assert "highest final training reward after 1,920 rollouts" in verdict(compare_runs([tmp_path]))[1]


@pytest.mark.parametrize(
    ("told", "recipe"),
    [
        ("dataset_name", {"dataset_name": "other.jsonl"}),
        ("prompt_template", {"prompt_template": "{prompt}"}),
        ("reward_kwargs.timeout", {"reward_kwargs": {"timeout": 2}}),
        ("model_name_or_path", {"model_name_or_path": "other"}),
        ("eval_benchmarks", {"eval_benchmarks": ["math=b.jsonl"]}),
        ("max_eval_samples", {"max_eval_samples": 10}),
        ("test_fraction", {"test_fraction": 0.1}),
        (
            None,
            {
                "prompt_sampler": "frontier",
                "learning_rate": 1e-5,
                "max_completion_length": 99,
                "eval_steps": 7,
                "reward_kwargs": {},
            },
        ),
    ],
)
def test_other_data_rewards_and_models_are_told(told, recipe, runs):
    found = runs(recipe={"opo": recipe}, rloo=[0.4], opo=[0.6])
    assert [f"more than their method ({told})" in note for note in found.notes] == [True] * (told is not None)


def test_other_problems_of_one_seed_are_told(tmp_path):
    for seed, problems in enumerate("ab"):
        write_run(tmp_path / f"{seed}", seed=seed, recipe={"eval_benchmarks": [f"math={problems}.jsonl"]})
    found = compare_runs([tmp_path])
    assert ["(eval_benchmarks)" in note for note in found.notes] == [True] * len(found.groups) == [True]


def test_one_setting_is_no_comparison(runs, tmp_path):
    found = runs(rloo=[0.6, 0.8])
    (only,) = verdict(found)
    assert "after 1,280 rollouts, 0.700 ± 0.141; there is nothing to compare it with" in only
    assert html(found).index("there is nothing to compare") < html(found).index("At the same number of rollouts")
    (tmp_path / "plots").mkdir()
    assert "**'rloo' has the highest final" in markdown(found, tmp_path).splitlines()[2]
