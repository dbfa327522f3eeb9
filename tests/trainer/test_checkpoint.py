"""Which folder is a checkpoint, which is the newest, which go: without a training."""

import pytest

from basis_rl.trainer import checkpoint


def make(folder, number, complete=True, state=True):
    path = folder / (number if isinstance(number, str) else f"checkpoint-{number}")
    checkpoint.begin(path)
    if state:
        (path / "trainer_state.json").write_text("{}")
    if complete:
        checkpoint.finish(path)
    return path


def names(paths):
    return [path.name for path in paths]


def test_complete_is_what_was_written_to_its_end(tmp_path):
    assert checkpoint.is_complete(make(tmp_path, 1))
    assert not checkpoint.is_complete(make(tmp_path, 2, complete=False))
    assert not checkpoint.is_complete(make(tmp_path, 3, state=False))
    again = make(tmp_path, 4)
    checkpoint.begin(again)
    assert not checkpoint.is_complete(again)
    assert not checkpoint.is_complete(tmp_path / "nothing")


def test_they_are_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 100):
        make(tmp_path, number)
    make(tmp_path, 101, complete=False)
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert names(checkpoint.checkpoints(tmp_path)) == [f"checkpoint-{n}" for n in (9, 10, 100, 101)]
    assert checkpoint.newest(tmp_path).name == "checkpoint-100"


def test_one_from_the_hub_is_taken_only_where_there_is_no_other(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    pulled = make(tmp_path, checkpoint.LAST)
    assert checkpoint.newest(tmp_path) == pulled
    make(tmp_path, 3)
    assert checkpoint.newest(tmp_path).name == "checkpoint-3"


@pytest.mark.parametrize(
    ("limit", "left"), [(None, [1, 2, 3, 5]), (0, [1, 2, 3, 5]), (2, [2, 3, 5]), (1, [2, 5]), (-1, [2, 5])]
)
def test_the_newest_stay_and_the_one_that_is_kept(limit, left, tmp_path):
    for number in (1, 2, 3, 5):
        make(tmp_path, number)
    make(tmp_path, 4, complete=False)
    (tmp_path / "checkpoint-6").mkdir()  # nothing of ours
    checkpoint.rotate(tmp_path, limit, keep=[tmp_path / "checkpoint-2"])
    assert names(checkpoint.checkpoints(tmp_path)) == [f"checkpoint-{n}" for n in [*left, 6]]


def test_a_kill_in_the_middle_of_a_deletion_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    make(tmp_path, 1)
    make(tmp_path, 2)
    seen = []
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path, **_: seen.append(checkpoint.is_complete(path)))
    checkpoint.rotate(tmp_path, 1)
    assert seen == [False]


@pytest.mark.parametrize("asked", [None, False, "false", "False", ""])
def test_nothing_is_resumed_that_is_not_asked_for(asked, tmp_path):
    make(tmp_path, 1)
    assert checkpoint.resolve(asked, tmp_path) is None


def test_what_is_asked_for_is_found(tmp_path):
    for word in (True, "true", "auto"):
        if word == "auto":
            assert checkpoint.resolve(word, tmp_path) is None
        else:
            with pytest.raises(ValueError, match="no complete checkpoint"):
                checkpoint.resolve(word, tmp_path)
    make(tmp_path, 1)
    make(tmp_path, 2)
    assert {checkpoint.resolve(word, tmp_path) for word in (True, "true", "auto")} == {str(tmp_path / "checkpoint-2")}
    assert checkpoint.resolve(tmp_path / "checkpoint-1", tmp_path) == str(tmp_path / "checkpoint-1")
    cut = make(tmp_path, 3, complete=False)
    with pytest.raises(ValueError, match=r"was cut off while it was written\. The newest complete .*checkpoint-2"):
        checkpoint.resolve(str(cut), tmp_path)
    with pytest.raises(ValueError, match=r"nothing' is no checkpoint\. The newest"):
        checkpoint.resolve(tmp_path / "nothing", tmp_path)
