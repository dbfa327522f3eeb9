"""What makes two rows one problem: prompt and what rewards read, without what is None; a row's own id wins."""

from functools import partial

import numpy as np
import pytest
from datasets import Dataset

from basis_rl.identity import prompt_id, row_id
from basis_rl.rewards import CodeReward, ExactReward, MathVerifyReward
from basis_rl.rewards.base import read_columns
from basis_rl.trainer.gather import prompt_ids_of
from basis_rl.trainer.plan import Plan

READS = {"solution", "seed"}


def different(*rows, reads=READS):
    return len({row_id(row, reads) for row in rows})


def test_prompt_and_the_columns_that_are_read_tell_rows_apart():
    row = {"prompt": "p", "solution": "1", "level": 3}
    assert different(row, {**row, "solution": "2"}, {**row, "prompt": "q"}) == 3
    assert different(row, {**row, "level": 4}, {**row, "prompt": " p\n"}) == 1
    assert different(row, {**row, "solution": 1}) == 2, "a number is no text"
    assert different(row, {**row, "level": 4}, reads=None) == 2
    assert different({"prompt": "p", "solution": "1", "seed": "2"}, {"prompt": "p", "solution": "2", "seed": "1"}) == 2
    assert row_id(row, ()) == prompt_id("p") != row_id(row, READS)


def test_a_rows_own_id_wins():
    assert row_id({"prompt_id": 7, "prompt": "x", "solution": "1"}, READS) == "7"
    assert row_id({"prompt_id": None, "prompt": "x"}, READS) == prompt_id("x")


def test_without_a_prompt_all_columns_count():
    assert different({"size": 3, "seed": 1}, {"seed": 1, "size": 3}) == 1
    assert different({"size": 3, "seed": 1}, {"size": 4, "seed": 1}) == 2


def test_what_is_none_does_not_count_however_deep():
    """`datasets` gives each message the keys of all others."""
    plain = {"prompt": [{"role": "user", "content": "x"}], "solution": {"a": [{"b": 1}]}}
    filled = Dataset.from_list([plain, {"prompt": [{"role": "tool", "content": "y", "name": "n"}], "seed": 1}])[0]
    assert filled["prompt"][0]["name"] is None
    deep = {"prompt": plain["prompt"], "solution": {"a": [{"b": 1, "c": None}], "d": None}, "seed": None}
    assert different(plain, filled, deep) == 1
    assert different(plain, {**plain, "solution": {"a": [{"b": 1, "c": 0}]}}) == 2
    assert prompt_id(plain["prompt"]) == prompt_id(filled["prompt"])


def test_arrays_count_by_what_they_hold():
    big = np.zeros(10_000)
    other = big.copy()
    other[5000] = 1.0
    rows = [{"prompt": "p", "seed": array} for array in (big, big.copy(), other)]
    assert different(*rows[:2]) == 1
    assert different(*rows) == 2


def test_the_ids_of_a_dataset_are_those_of_its_rows():
    rows = [{"prompt": "p", "solution": "1", "level": 1}, {"prompt": "p", "solution": "2", "level": 1}]
    for reads in (frozenset({"solution"}), frozenset(), None):
        assert prompt_ids_of(Dataset.from_list(rows), reads) == [row_id(row, reads) for row in rows]
    own = Dataset.from_list([{**rows[0], "prompt_id": "mine"}, {**rows[1], "prompt_id": None}])
    assert prompt_ids_of(own, frozenset({"solution"})) == ["mine", row_id(rows[1], {"solution"})]


class Declared:
    reads = ("hidden",)

    def __call__(self, completions, kind, weight=1.0, **kwargs):
        return [0.0] * len(completions)


def test_what_a_reward_reads_is_in_its_signature_or_declared():
    def anything(prompts, completions, completion_ids, trainer_state, **kwargs):
        return []

    assert read_columns([anything]) == set()
    assert read_columns([Declared(), anything]) == {"kind", "weight", "hidden"}
    assert read_columns([partial(Declared(), kind="x")]) >= {"kind", "weight"}
    assert read_columns([ExactReward(), MathVerifyReward(num_workers=1)]) == {"solution"}
    assert read_columns([CodeReward(column="tests", fn_name="name", allow_unsafe=True)]) == {"tests", "name"}
    assert read_columns(["owner/reward-model"]) == set()
    wrong = Declared()
    wrong.reads = "hidden"
    with pytest.raises(ValueError, match="`reads` of 'Declared' must be a list of columns, got 'hidden'"):
        read_columns([wrong])


class Seeded:
    def reset(self, seed, **kwargs):
        return None


class Told:
    def reset(self, prompt, **row):
        return None


class Anything:
    def reset(self, **row):
        return None


@pytest.mark.parametrize(
    ("factory", "reads"),
    [
        (None, {"kind", "weight", "hidden"}),
        (Seeded, {"kind", "weight", "hidden", "seed"}),
        (lambda: Seeded(), {"kind", "weight", "hidden", "seed"}),
        ({"a": Seeded, "b": Seeded}, {"kind", "weight", "hidden", "seed", "environment"}),
        (Anything, None),
        (Told, None),
        ({"a": Seeded, "b": Anything}, None),
    ],
)
def test_what_an_environment_is_reset_with_counts(factory, reads, tmp_path):
    """One that names no column may read any."""
    plan = Plan(None, reward_funcs=[Declared()], kwargs={"environment_factory": factory})
    assert plan.reads == reads
