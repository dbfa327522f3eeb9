"""What everything stands on: batches and their rows, folders of artefacts, names that people give."""

import json
import sys
from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from basis_rl.names import article, did_you_mean, import_object
from basis_rl.run import artefacts
from basis_rl.types import RolloutBatch

BATCH = RolloutBatch(
    rewards=torch.arange(4.0),
    group_ids=torch.tensor([0, 0, 1, 1]),
    prompt_ids=["a", "a", "b", "b"],
    action_mask=torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]]).bool(),
    energies=torch.arange(12.0).reshape(4, 3),
    greedy_rewards=torch.tensor([0.5, 0.5, 0.7, 0.7]),
    prompt_texts=["A", "A", "B", "B"],
    step=3,
)


def test_rows_of_a_batch_keep_all_that_belongs_to_them():
    part = BATCH.take(torch.tensor([3, 0]), tokens=2)
    assert part.rewards.tolist() == [3.0, 0.0]
    assert part.group_ids.tolist() == [1, 0]
    assert (part.prompt_ids, part.prompt_texts) == (["b", "a"], ["B", "A"])
    assert part.action_mask.tolist() == [[True, True], [True, True]]
    assert part.energies.tolist() == [[9.0, 10.0], [0.0, 1.0]]
    assert part.greedy_rewards.tolist() == pytest.approx([0.7, 0.5])
    assert part.kl is None
    assert part.step == 3
    assert BATCH.take(torch.tensor([1])).energies.shape == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_ids": torch.zeros(3)}, "group_ids must be"),
        ({"prompt_ids": ["a"]}, r"prompt_ids must be \(4,\), got \(1,\)"),
        ({"prompt_texts": ["a"]}, "prompt_texts must be"),
        ({"energies": torch.zeros(4, 2)}, "energies must be"),
        ({"kl": torch.zeros(3, 3)}, "kl must be"),
        ({"greedy_rewards": torch.zeros(2)}, "greedy_rewards must be"),
        ({"action_mask": torch.ones(3, 3).bool()}, "action_mask must be"),
    ],
)
def test_fields_of_another_shape_are_refused(changes, message):
    with pytest.raises(AssertionError, match=message):
        replace(BATCH, **changes)


THING = artefacts.Kind("thing", "main.parquet", 1, "basis-rl things")


def write(path, value=1, kind=THING, **metadata):
    return kind.write(path, {kind.main_file: pa.table({"x": [value]})}, metadata)


def test_a_folder_is_replaced_whole_and_a_crash_leaves_the_old_one(tmp_path, monkeypatch):
    write(tmp_path / "a", 1)
    assert json.loads((write(tmp_path / "a", 2, note="new") / "metadata.json").read_text())["note"] == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def crash(table, path):
        raise OSError("disk full")

    monkeypatch.setattr(artefacts.pq, "write_table", crash)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "a", 3)
    assert json.loads((tmp_path / "a" / "metadata.json").read_text())["note"] == "new"


def test_the_old_folder_stays_until_the_new_one_is_in_its_place(tmp_path, monkeypatch):
    write(tmp_path / "a", note="old")
    rename = artefacts.Path.rename

    def crash(path, target):
        if path.name.endswith(".part"):
            raise OSError("killed here")
        return rename(path, target)

    monkeypatch.setattr(artefacts.Path, "rename", crash)
    with pytest.raises(OSError, match="killed here"):
        write(tmp_path / "a", note="new")
    assert any(json.loads(path.read_text())["note"] == "old" for path in tmp_path.glob("*/metadata.json"))


def test_only_an_artefact_of_the_kind_is_opened_or_replaced(tmp_path):
    write(tmp_path / "a")
    THING.check_destination(tmp_path / "a")
    THING.check_destination(tmp_path / "not there yet")
    other = replace(THING, main_file="other.parquet")
    with pytest.raises(ValueError, match="left alone"):
        other.check_destination(tmp_path / "a")
    with pytest.raises(ValueError, match=r"has no other\.parquet"):
        other.open(tmp_path / "a")
    folder, metadata = THING.open(tmp_path / "a")
    assert (folder, metadata["format"]) == (tmp_path / "a", 1)


def test_names(tmp_path, monkeypatch):
    assert did_you_mean("rlo", ["rloo", "grpo"]) == " Did you mean 'rloo'?"
    assert did_you_mean("something", ["rloo"]) == ""
    assert [article(word) for word in ("int", "Tensor", "OSError", "NoneType")] == ["an", "a", "an", "a"]
    assert import_object("json:dumps", "thing") is import_object("json.dumps", "thing") is json.dumps
    (tmp_path / "mine_here.py").write_text("x = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert import_object("mine_here:x", "thing") == 7
    with pytest.raises(ValueError, match="The thing 'mine_here:y' cannot be imported"):
        import_object("mine_here:y", "thing")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = (", r"SyntaxError: .*never closed \(bad_here.py, line 1\)"),
        ("x = 1\nraise RuntimeError('no GPU')", r"RuntimeError: no GPU \(.*bad_here.py, line 2\)"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3 \(.*bad_here.py, line 2\)"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
    ],
)
def test_a_module_that_does_not_load_is_one_message(code, message, tmp_path, monkeypatch):
    (tmp_path / "bad_here.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"The thing 'bad_here:x' cannot be imported: {message}"):
        import_object("bad_here:x", "thing")
