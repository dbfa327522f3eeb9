"""Which folder is a checkpoint, which is the newest, which go: without a training."""

import json
import threading

import pytest
import torch
from safetensors.torch import save_file

from basis_rl.run import checkpoint
from basis_rl.run.errors import DiskFull

FILES = {"model.safetensors": b"weights", "optimizer.pt": b"moments", "scheduler.pt": b"rate", "rng_state.pth": b"seed"}
FILES |= {"phase_0.pt": b"place", "baseline_state.pt": b"means", "sub/part.bin": b"deep"}


def make(folder, number, complete=True, state=True):
    path = folder / (number if isinstance(number, str) else f"checkpoint-{number}")
    checkpoint.begin(path)
    for name, content in FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
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


def test_the_manifest_has_what_every_rank_has_written_or_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.7)
    path = make(tmp_path, 1, complete=False)
    (path / "rng_state_1.pth").write_bytes(b"seed")
    written = {*FILES, "trainer_state.json", "rng_state_1.pth"}
    assert set(checkpoint.names_in(path)) == written
    with pytest.raises(DiskFull, match=r"lacks phase_1.pt on \S+, which other ranks have written"):
        checkpoint.finish(path, {*written, "phase_1.pt"})
    assert checkpoint.was_cut_off(path)
    assert not (path / checkpoint.MANIFEST).exists()
    (path / "rng_state_1.pth").rename(tmp_path / "on its way")
    later = threading.Timer(0.3, lambda: (tmp_path / "on its way").rename(path / "rng_state_1.pth"))
    later.start()
    checkpoint.finish(path, written)
    later.join()
    assert set(json.loads((path / checkpoint.MANIFEST).read_text())["files"]) == written
    assert checkpoint.names_in(path) == sorted(written), "not the manifest itself"
    (path / "rng_state_1.pth").unlink()
    assert "rng_state_1.pth is missing" in checkpoint.damage(path)


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
    assert checkpoint.resolve(asked, tmp_path) is None
    make(tmp_path, 1, complete=False)
    assert checkpoint.resolve(asked, tmp_path) is None
    make(tmp_path, 2)
    with pytest.raises(ValueError, match=r"1 checkpoint\(s\) of an earlier run, the newest is checkpoint-2"):
        checkpoint.resolve(asked, tmp_path)
    assert checkpoint.resolve(asked, tmp_path, overwrite=True) is None


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "adapter_model.safetensors"])
@pytest.mark.parametrize("asked", [None, "auto", "elsewhere"])
def test_a_model_without_checkpoints_is_not_overwritten(asked, name, tmp_path):
    """A run that is finished and saved none, whichever way the next one begins."""
    output = tmp_path / "run"
    output.mkdir()
    start = str(make(tmp_path, 1)) if asked == "elsewhere" else asked
    (output / "notes.safetensors.txt").write_text("mine")
    found = checkpoint.resolve(start, output)
    (output / name).write_text("trained")
    with pytest.raises(ValueError, match=f"holds a trained model .{name}.*--overwrite_output_dir true"):
        checkpoint.resolve(start, output)
    assert checkpoint.resolve(start, output, overwrite=True) == found
    (output / "INCOMPLETE").touch()
    assert checkpoint.resolve(start, output) == found, "a model that was cut off while it was saved is none"
    (output / "INCOMPLETE").unlink()
    moved = checkpoint.make_room(output, found)
    assert (moved / name).read_text() == "trained"
    assert (output / "notes.safetensors.txt").exists()
    assert checkpoint.make_room(output, found) is None


def test_what_is_asked_for_is_found(tmp_path):
    assert checkpoint.resolve("auto", tmp_path) is None
    for word in (True, "true"):
        with pytest.raises(ValueError, match="no complete checkpoint"):
            checkpoint.resolve(word, tmp_path)
    make(tmp_path, 1)
    make(tmp_path, 2)
    assert {checkpoint.resolve(word, tmp_path) for word in (True, "true", "auto")} == {str(tmp_path / "checkpoint-2")}
    assert checkpoint.resolve(tmp_path / "checkpoint-1", tmp_path) == str(tmp_path / "checkpoint-1")
    cut = make(tmp_path, 3, complete=False)
    with pytest.raises(ValueError, match=r"was cut off while it was written\. The newest whole .*checkpoint-2"):
        checkpoint.resolve(str(cut), tmp_path)
    with pytest.raises(ValueError, match=r"nothing' is not a checkpoint\. The newest"):
        checkpoint.resolve(tmp_path / "nothing", tmp_path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "flipped": flip,
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", [*FILES, "trainer_state.json"])
def test_a_damaged_checkpoint_is_named_and_the_next_older_whole_one_is_taken(name, how, tmp_path, caplog):
    make(tmp_path, 1)
    make(tmp_path, 2)
    third = make(tmp_path, 3)
    DAMAGES[how](third / name)
    assert checkpoint.resolve("auto", tmp_path) == str(tmp_path / "checkpoint-2")
    assert len(caplog.messages) == 1
    assert "checkpoint-3" in caplog.text
    assert name in caplog.text
    with pytest.raises(ValueError, match=r"checkpoint-3' is .* newest whole one beside it is .*checkpoint-2"):
        checkpoint.resolve(third, tmp_path)


def test_where_all_are_damaged_nothing_is_started(tmp_path):
    for number in (1, 2):
        flip(make(tmp_path, number) / "optimizer.pt")
    for word in ("auto", True):
        with pytest.raises(ValueError, match=r"none of them .* checkpoint-2 \(optimizer.pt has other bytes"):
            checkpoint.resolve(word, tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("manifest", [True, False])
def test_what_every_trainer_reads_must_be_there_with_and_without_a_manifest(manifest, name, tmp_path):
    """As with `save_only_model`, or in a checkpoint of another trainer, which has no manifest."""
    path = make(tmp_path, 1, complete=False) if manifest else whole_files(tmp_path / "checkpoint-1")
    if not manifest:
        assert checkpoint.newest(tmp_path) == path
    (path / name).unlink()
    if manifest:
        checkpoint.finish(path)
    with pytest.raises(ValueError, match="none of them can be resumed"):
        checkpoint.resolve("auto", tmp_path)


def whole_files(path):
    """A checkpoint of another trainer, with files as libraries write them and without a manifest."""
    path.mkdir()
    save_file({"weight": torch.ones(100)}, path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.ones(100)}, path / name)
    torch.save({"old": torch.ones(3)}, path / "training_args.bin", _use_new_zipfile_serialization=False)
    (path / "trainer_state.json").write_text('{"global_step": 2, "log_history": []}')
    return path


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "model.safetensors", "trainer_state.json"])
@pytest.mark.parametrize("how", ["cut short", "flipped", "empty", "other"])
def test_damage_without_a_manifest_is_seen_and_the_older_one_taken(how, name, tmp_path, caplog):
    """But for a bit within the weights, of which nothing else tells."""
    older, newer = whole_files(tmp_path / "checkpoint-1"), whole_files(tmp_path / "checkpoint-2")
    assert checkpoint.newest(tmp_path) == newer
    if how == "other":
        (newer / name).write_text("[1, 2]")
    elif (how, name) != ("flipped", "trainer_state.json"):
        DAMAGES[how](newer / name)
    else:
        (newer / name).write_text('{"global_step": "2"}')
    unseen = (how, name) == ("flipped", "model.safetensors")
    assert checkpoint.resolve("auto", tmp_path) == str(newer if unseen else older)
    assert (name in caplog.text) != unseen


def test_a_damaged_manifest_is_no_proof(tmp_path):
    make(tmp_path, 1)
    (make(tmp_path, 2) / "manifest.json").write_text('{"files": ')
    assert checkpoint.newest(tmp_path).name == "checkpoint-1"


def test_files_are_read_once_in_a_process_unless_they_change(tmp_path, monkeypatch):
    path, read = make(tmp_path, 1), []
    checkpoint._digest.cache_clear()
    digest = checkpoint.hashlib.file_digest
    monkeypatch.setattr(checkpoint.hashlib, "file_digest", lambda *args: read.append(1) or digest(*args))
    assert checkpoint.damage(path) == ""
    first = len(read)
    assert first == len(FILES) + 1
    assert checkpoint.damage(path) == ""
    assert len(read) == first
    flip(path / "optimizer.pt")
    assert checkpoint.damage(path) == "optimizer.pt has other bytes"
    assert len(read) == first + 1


def test_a_fresh_start_moves_the_earlier_run_aside_and_deletes_nothing(tmp_path):
    for number in (9, 10):
        make(tmp_path, number)
    make(tmp_path, 11, complete=False)
    kept = {"metrics.jsonl", "run.json", "model.safetensors", "README.md", "notes.txt"}
    for name in kept:
        (tmp_path / name).write_text("old")
    place = checkpoint.make_room(tmp_path, None)
    assert place == tmp_path / "previous-1"
    assert {path.name for path in place.iterdir()} == {"checkpoint-9", "checkpoint-10", *kept} - {"notes.txt"}
    assert checkpoint.damage(place / "checkpoint-10") == ""
    assert {path.name for path in tmp_path.iterdir()} == {"previous-1", "checkpoint-11", "notes.txt"}
    assert checkpoint.resolve(None, tmp_path) is None
    assert checkpoint.make_room(tmp_path, None) is None
    make(tmp_path, 3)
    assert checkpoint.make_room(tmp_path, None) == tmp_path / "previous-2"


def test_checkpoints_after_the_one_that_is_resumed_go_aside(tmp_path):
    """Else `rotate` would keep those and delete the new ones, and `auto` continue the wrong run."""
    for number in (3, 9, 12):
        make(tmp_path, number)
    (tmp_path / "metrics.jsonl").write_text("of this run")
    place = checkpoint.make_room(tmp_path, str(tmp_path / "checkpoint-3"))
    assert sorted(names(place.iterdir())) == ["checkpoint-12", "checkpoint-9"]
    assert (tmp_path / "metrics.jsonl").is_file()
    assert checkpoint.make_room(tmp_path, str(tmp_path / "checkpoint-3")) is None


@pytest.mark.parametrize("name", ["best", "best-1", "checkpoint-best-1"])
def test_a_checkpoint_may_have_another_name(name, tmp_path):
    """Then its step is what it says inside."""
    for number in (2, 4, 6):
        made = make(tmp_path, number)
        (made / "trainer_state.json").write_text(json.dumps({"global_step": number}))
        checkpoint.finish(made)
    start = (tmp_path / "checkpoint-4").rename(tmp_path / name)
    assert checkpoint.resolve(start, tmp_path) == str(start)
    place = checkpoint.make_room(tmp_path, str(start))
    assert names(place.iterdir()) == ["checkpoint-6"]
    assert names(checkpoint.checkpoints(tmp_path)) == ["checkpoint-2"]


def test_a_checkpoint_of_another_folder_is_a_fresh_start(tmp_path):
    start = make(tmp_path / "a", 5)
    make(tmp_path / "b", 7)
    with pytest.raises(ValueError, match="of an earlier run"):
        checkpoint.resolve(start, tmp_path / "b")
    assert checkpoint.resolve(start, tmp_path / "b", overwrite=True) == str(start)
    assert checkpoint.make_room(tmp_path / "b", str(start)) == tmp_path / "b" / "previous-1"
