"""What makes two rows one problem: prompt and what rewards read, without what is None; a row's own id wins."""

import json
import math
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, load_dataset

from basis_rl.identity import prompt_id, row_id
from basis_rl.rewards import CodeReward, ExactReward, MathVerifyReward
from basis_rl.rewards.base import read_columns
from basis_rl.trainer.gather import prompt_ids_of
from basis_rl.trainer.plan import Plan, as_dataset

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


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_arrays_count_by_values_and_shape(make):
    long = [0.0] * 5000 + [1.0] + [0.0] * 4999
    arrays = [make(long), make([0.0] * 10_000), make([[1, 2], [3, 4]]), make([[1, 2, 3, 4]]), make([1, 2, 3, 4])]
    assert different(*({"prompt": "p", "seed": array} for array in arrays)) == len(arrays)
    for array in arrays:
        same = [array, array.tolist(), tuple(array.tolist()), make(array.tolist())]
        assert different(*({"prompt": "p", "seed": each} for each in same)) == 1


def test_numbers_count_by_value():
    """JSON and Parquet turn 1 into 1.0, if another row has 1.5."""
    one = [1, 1.0, np.int8(1), np.float32(1), np.array(1), torch.tensor(1.0), Decimal("1.0"), np.uint64(1)]
    others = [True, np.bool_(True), "1", [1], 1.5, np.float16(1.5), -1, math.inf, -math.inf, math.nan, 10**300, 0, -0.0]
    ids = [row_id({"prompt": "p", "seed": value}, READS) for value in [*one, *others]]
    assert len(set(ids[: len(one)])) == 1
    assert len(set(ids)) == 1 + len(others) - 3
    assert different({"prompt": "p", "seed": {1, 2}}, {"prompt": "p", "seed": {2, 1}}) == 1


def test_pictures_count_by_mode_size_and_colours():
    Image = pytest.importorskip("PIL.Image")
    data = bytes(range(24))
    pictures = [Image.frombytes(*given, data) for given in (("L", (4, 6)), ("L", (6, 4)), ("RGB", (4, 2)))]
    for colour in (0, 255):
        pictures.append(Image.frombytes("P", (4, 6), data))
        pictures[-1].putpalette([colour] * 768)
    rows = [{"prompt": "p", "seed": picture} for picture in pictures]
    assert different(*rows) == 5
    assert different(*rows, *({"prompt": "p", "seed": picture.copy()} for picture in pictures)) == 5
    kept = Dataset.from_list(rows[:3])
    assert prompt_ids_of(kept, READS) == [row_id(row, READS) for row in rows[:3]]


def test_what_has_no_text_of_its_own_is_refused():
    with pytest.raises(
        ValueError, match="holds values of type object, known by their address alone: add a column prompt_id"
    ):
        row_id({"prompt": "p", "seed": [object()]}, READS)
    assert row_id({"prompt": "p", "seed": object(), "prompt_id": "mine"}, READS) == "mine"


ROWS = [
    {"prompt": "p", "solution": "2024-01-01", "seed": 1},
    {"prompt": [{"role": "user", "content": "x"}], "solution": "2024-01-02", "seed": 2.5},
    {"prompt": [{"role": "tool", "content": "x", "name": "n"}], "solution": "2024-01-03", "seed": None},
    {"prompt": "p", "solution": {"a": [1, 2.0], "b": {"c": True}}, "seed": 3},
    {"prompt": "p", "solution": {"a": [], "b": None}, "seed": 4},
    {"prompt": "p", "solution": [[1, 2], [3, 4]], "seed": 0.1},
    {"prompt": "p", "solution": [[1, 2, 3, 4]], "seed": 1e300},
]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[1:3], ROWS[3:5], ROWS[5:]])
def test_a_row_has_one_id_in_every_format(rows, tmp_path):
    ids = [row_id(row, READS) for row in rows]
    listed = Dataset.from_list(rows)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    listed.to_parquet(tmp_path / "rows.parquet")
    found = [listed, listed.to_iterable_dataset(), IterableDataset.from_generator(lambda: iter(rows))]
    for made in (listed, listed.to_iterable_dataset()):
        found += [made.with_format(kind) for kind in ("numpy", "torch")]
    for kind, path in (("json", tmp_path / "rows.jsonl"), ("parquet", tmp_path / "rows.parquet")):
        given = {"data_files": str(path), "split": "train", "cache_dir": str(tmp_path)}
        found += [load_dataset(kind, **given), load_dataset(kind, streaming=True, **given)]
    for dataset in found:
        assert [row_id(row, READS) for row in as_dataset(dataset, "train_dataset")] == ids


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
