"""The bottom line in words agrees with the differences in the table, and claims nothing that the seeds do not show."""

import pytest

from basis_rl.report.compare import compare_runs
from basis_rl.report.page import html, markdown
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
LEVELS = {
    "'rloo' is ahead: | 0.610 ± 0.014 after 1,280 rollouts | 0.100 [+0.100, +0.100] (95 % interval over 2 seeds)": WIDE,
    "next, 'opo' (0.510 ± 0.014) | 'rloo' is ahead of 'grpo' (+0.200 [+0.200, +0.200])": WIDE,
    "'rloo' reaches the final training reward of 'grpo' after 128 of the 1,280 rollouts": WIDE,
    "The seeds do not show whether 'rloo' or 'grpo' is ahead | 0.050 [−1.856, +1.956]": CLOSE,
    "'rloo' is ahead of 'opo' (+0.400 [+0.400, +0.400])": CLOSE,
    "No verdict: 'rloo' ends highest | 0.100 above | 'rloo' is not certain to be ahead of 'opo' (+0.200)": SINGLE,
    "No verdict: | and 'rloo' end equal": {"rloo": [0.5], "grpo": [0.5]},
    "end equal over 2 seeds | 0.600 ± 0.141 after": {"rloo": [0.5, 0.7], "grpo": [0.5, 0.7]},
    "'grpo' is ahead: it has an evaluation reward of 0.590": {"evaluate": True, **WIDE, "opo": [0.9, 0.92]},
}


@pytest.mark.parametrize("said", LEVELS)
def test_who_is_ahead_and_by_how_much(said, runs):
    told = " ".join(verdict(runs(**LEVELS[said])))
    assert [words for words in said.split(" | ") if words not in told] == []


@pytest.mark.parametrize("evaluate", [False, True])
def test_rewards_of_other_prompts_are_not_compared(evaluate, runs):
    drawn = {"opo": {"prompt_sampler": "frontier"}}
    said = verdict(runs(recipe=drawn, evaluate=evaluate, rloo=[0.4, 0.42], opo=[0.60, 0.62]))
    if evaluate:
        assert "'rloo' is ahead" in said[0]
    else:
        assert said[0].startswith("No verdict: the settings draw their prompts differently")
        assert "ahead" not in " ".join(said)


@pytest.mark.parametrize(
    ("what", "recipe"),
    [
        ("data", {"dataset_name": "other.jsonl"}),
        ("data", {"prompt_template": "{prompt}"}),
        ("rewards", {"reward_kwargs": {"timeout": 2}}),
        ("model", {"model_name_or_path": "other"}),
        (None, {"prompt_sampler": "frontier", "learning_rate": 1e-5, "max_completion_length": 99}),
    ],
)
def test_other_data_rewards_and_models_are_told(what, recipe, runs):
    found = runs(recipe={"opo": recipe}, rloo=[0.4], opo=[0.6])
    assert [f"differ in their {what} " in note for note in found.notes] == [True] * (what is not None)


def test_the_price_of_the_table_is_told(runs):
    found = runs(table="t", basis=[0.60, 0.62], rloo=[0.40, 0.42])
    found = compare_runs([run.path for group in found.groups for run in group.runs], reference="rloo")
    assert "its value table took another 1,000 rollouts" in verdict(found)[-1]


def test_one_setting_is_no_comparison(runs, tmp_path):
    found = runs(rloo=[0.6, 0.8])
    (only,) = verdict(found)
    assert "0.700 ± 0.141 after 1,280 rollouts; there is nothing to compare it with" in only
    assert html(found).index("there is nothing to compare") < html(found).index("At the same number of rollouts")
    (tmp_path / "plots").mkdir()
    assert "**'rloo' has a final training reward" in markdown(found, tmp_path).splitlines()[2]
