"""A full disk is said to be one, and costs neither a checkpoint nor the log."""

import errno
import json
import os
from types import SimpleNamespace

import pytest

from basis_rl.report import plot_training
from basis_rl.run import artefacts, checkpoint, disk
from basis_rl.run.disk import checkpoint_bytes, free_bytes, naming_a_full_disk
from basis_rl.run.errors import DiskFull
from basis_rl.run.progress import ProgressLines
from tests.trainer.test_faults import build


@pytest.mark.parametrize(
    ("error", "free", "named"),
    [
        (OSError(errno.ENOSPC, "full"), 1 << 40, True),
        (Exception("I/O error: No space left on device (os error 28)"), 1 << 40, True),  # safetensors
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), 0, True),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), 1 << 40, False),
        (OSError(errno.EACCES, "no"), 1 << 40, False),
    ],
)
def test_each_library_says_it_in_its_own_way(error, free, named, monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "free_bytes", lambda folder: free)
    with pytest.raises(DiskFull if named else type(error)) as raised, naming_a_full_disk(tmp_path, 3 * 2**30):
        raise error
    assert ("needs about 3.00 GiB" in str(raised.value)) == named


def test_what_is_free_is_known_before_the_folder_is_there(tmp_path):
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free_bytes(tmp_path), rel=0.01)
    assert checkpoint_bytes(100, 10, 2) == 280


def log(folder, *steps):
    args = SimpleNamespace(output_dir=str(folder), temperature=1.0, top_k=0)
    for step in steps:
        state = SimpleNamespace(global_step=step, is_world_process_zero=True, max_steps=4)
        ProgressLines(plot_training).on_log(args, state, None, {"reward": 1.0})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_log_on_a_full_disk(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskFull):
        log(tmp_path, 1)


def test_a_line_after_one_that_was_cut_off_is_one_of_its_own(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    log(tmp_path, 3, 4)
    assert [row["step"] for row in artefacts.read_lines(path)] == [1, 3, 4]


def test_a_checkpoint_on_a_full_disk_leaves_the_earlier_ones(tmp_path, monkeypatch):
    trainer = build(tmp_path, None, save_strategy="steps", save_steps=1)
    write = checkpoint.write_whole

    def full(path, text):
        if path.parent.name == "checkpoint-3":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(DiskFull, match=r"needs about 0\.00 GiB .* earlier checkpoints are whole"):
        trainer.train()
    assert checkpoint.newest(tmp_path).name == "checkpoint-2"
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2
