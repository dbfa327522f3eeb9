"""A full disk is said to be one, and costs neither a checkpoint nor the log."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError
from transformers import TrainerCallback
from trl import GRPOTrainer

from basis_rl.baselines import Ppo
from basis_rl.cli.main import main
from basis_rl.report import plot_training
from basis_rl.run import artefacts, checkpoint, disk, progress, run_lock
from basis_rl.run.disk import checkpoint_bytes, free_bytes, naming_a_full_disk
from basis_rl.run.errors import DiskFull, FolderLost
from basis_rl.run.progress import ProgressLines
from tests.cli.conftest import recipe as recipe
from tests.support.tiny import tiny_trainer
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


def test_beside_writes_only_what_says_so_is_a_full_disk(monkeypatch, tmp_path):
    """A run within which anything may fail while the disk is full; also where something else is raised from it."""
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 0)
    with pytest.raises(KeyError), naming_a_full_disk(tmp_path, only_writes=False):
        raise KeyError("a reward")
    with pytest.raises(DiskFull, match="is full"), naming_a_full_disk(tmp_path, only_writes=False):
        raise RuntimeError("the training has failed") from OSError(errno.ENOSPC, "full")
    nested = (naming_a_full_disk(tmp_path), naming_a_full_disk(tmp_path, 2**30))
    with pytest.raises(DiskFull, match="needs about 1"), nested[0], nested[1]:
        raise OSError(errno.EDQUOT, "full")


def test_what_is_free_is_known_before_the_folder_is_there(tmp_path):
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free_bytes(tmp_path), rel=0.01)
    assert checkpoint_bytes(100, 10, 2) == 280


def test_the_size_that_is_named_holds_the_critic_as_it_is_saved(tmp_path):
    """Float32 weights and two moments of each; with save_only_model neither it nor any moment is saved."""
    rloo, ppo, bare = (
        tiny_trainer(tmp_path, baseline, **settings)
        for baseline, settings in (("rloo", {}), (Ppo(), {}), (Ppo(), {"save_only_model": True}))
    )
    critic = sum(parameter.numel() for parameter in ppo._critic.module.parameters())
    policy = sum(parameter.numel() for parameter in ppo.model.parameters())
    assert rloo._checkpoint_size() == 12 * policy
    assert ppo._checkpoint_size() == 12 * (policy + critic)
    assert bare._checkpoint_size() == 4 * policy


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


def full_for(monkeypatch, module, name, when=lambda *args: True):
    """Lets the disk be full whenever this function of the module is called so."""
    write = getattr(module, name)

    def full(*args, **kwargs):
        if when(*args):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **kwargs)

    monkeypatch.setattr(module, name, full)


@pytest.mark.parametrize("where", ["the lock", "the log of a resume", "the model"])
def test_whichever_write_meets_a_full_disk_names_it(where, tmp_path, monkeypatch):
    """At the start, at a resume, and at the end, where safetensors has an error of its own."""
    trainer = build(tmp_path, None, save_strategy="steps", save_steps=1, max_steps=2)
    if where == "the lock":
        full_for(monkeypatch, run_lock.os, "pwrite")
        with pytest.raises(DiskFull, match="Make room"):
            trainer.train()
        return
    trainer.train()
    if where == "the model":

        def no_room(*args, **kwargs):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(GRPOTrainer, "save_model", no_room)
        with pytest.raises(DiskFull, match="earlier checkpoints are whole"):
            trainer.save_model(str(tmp_path))
        assert checkpoint.was_cut_off(tmp_path), "so that a resume saves it"
        return
    full_for(monkeypatch, progress, "write_whole")
    with pytest.raises(DiskFull, match="Make room"):
        build(tmp_path, None, save_strategy="steps", max_steps=3).train(resume_from_checkpoint=True)
    assert checkpoint.newest(tmp_path).name == "checkpoint-2"


def test_the_command_says_it_in_one_line(recipe, monkeypatch, capsys):
    full_for(monkeypatch, run_lock.os, "pwrite")
    assert main(["train", recipe()]) == 70
    said = capsys.readouterr().err
    assert said.count("basis-rl: error:") == 1
    assert "is full" in said
    assert "Traceback" not in said


class Acts(TrainerCallback):
    """Does something at the beginning or at the end of the third step."""

    def __init__(self, begin=None, end=None):
        self.begin, self.end = begin, end

    def on_step_begin(self, args, state, control, **kwargs):
        if self.begin and state.global_step == 2:
            self.begin()

    def on_step_end(self, args, state, control, **kwargs):
        if self.end and state.global_step == 3:
            self.end()


def removed(output):
    """Another folder of the same name takes its place."""
    shutil.rmtree(output)
    output.mkdir()


def moved(output):
    """So that a write into it fails."""
    output.rename(output.with_name("moved"))
    raise FileNotFoundError("what was to be written")


def lost(output, settings, *callbacks):
    """The step at which a training ends because its folder is gone."""
    trainer = build(output, None, max_steps=6, **settings)
    for callback in callbacks:
        trainer.add_callback(callback)
    with pytest.raises(FolderLost, match="was removed or renamed while the run was going on"):
        trainer.train()
    return trainer.state.global_step


SAVES = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("settings", [{"logging_steps": 1, "save_strategy": "no"}, {"logging_steps": 50, **SAVES}])
def test_a_folder_that_is_gone_is_not_made_again(settings, tmp_path):
    """What a log or a checkpoint would write there is of no run, and a second one could begin there."""
    output = tmp_path / "run"
    assert lost(output, settings, Acts(begin=lambda: removed(output))) == 3
    assert not list(output.iterdir())


def test_a_write_that_the_removal_of_the_folder_meets_is_no_failure_of_its_own(tmp_path):
    lost(tmp_path / "run", {}, Acts(end=lambda: moved(tmp_path / "run")))


@pytest.mark.parametrize("writer", ["publish.save_run_info", "publish.write_card", "trainer.plot_training"])
def test_a_card_or_plot_of_a_folder_that_is_removed_is_no_warning(writer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(f"basis_rl.trainer.{writer}", lambda *given, **named: moved(tmp_path / "run"))
    lost(tmp_path / "run", {**SAVES, "save_steps": 2})
    assert "could not be" not in caplog.text


def test_a_checkpoint_whose_folder_is_removed_while_it_is_written_is_none(tmp_path, monkeypatch):
    """The libraries that write it make its folders anew."""
    output = tmp_path / "run"
    begin = checkpoint.begin

    def removed(folder):
        if folder.name == "checkpoint-3":
            output.rename(tmp_path / "moved")
        begin(folder)

    monkeypatch.setattr(checkpoint, "begin", removed)
    lost(output, SAVES)
    assert checkpoint.newest(output) is None
    assert checkpoint.newest(tmp_path / "moved").name == "checkpoint-2"


def test_a_line_after_one_that_was_cut_off_is_one_of_its_own(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    log(tmp_path, 3, 4)
    assert [row["step"] for row in artefacts.read_lines(path)] == [1, 3, 4]


def test_a_checkpoint_on_a_full_disk_leaves_the_earlier_ones(tmp_path, monkeypatch):
    trainer = build(tmp_path, None, save_strategy="steps", save_steps=1)
    full_for(monkeypatch, checkpoint, "write_whole", lambda path, text: path.parent.name == "checkpoint-3")
    with pytest.raises(DiskFull, match=r"needs about 0\.00 GiB .* earlier checkpoints are whole"):
        trainer.train()
    assert checkpoint.newest(tmp_path).name == "checkpoint-2"
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2
