"""What commit 4e6f43c wrote: a run that was stopped within a generation batch, and a value table."""

import json
import shutil
from pathlib import Path

import pytest

from basis_rl.baselines import BasisHistory
from basis_rl.cli.main import main
from basis_rl.run.record import load_run_info
from basis_rl.values import ValueTable
from tests.support.tiny import sums, tiny_trainer

WRITTEN = Path(__file__).with_name("written_by_4e6f43c")


def build(folder, **settings):
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
    return tiny_trainer(folder, BasisHistory(), prompt_sampler="variance", **saving, **settings)


@pytest.fixture
def folder(tmp_path):
    """Converted: its data set had its own prompt_id."""
    copied = Path(shutil.copytree(WRITTEN / "run", tmp_path / "run"))
    assert main(["convert", str(copied), "--own_ids"]) == 0
    return copied


def test_its_run_is_resumed_and_equals_its_uninterrupted_one(folder):
    """Rollouts in use, belief, draws, random numbers, optimizer and usage are in the checkpoint."""
    trainer = build(folder)
    trainer.train(resume_from_checkpoint=True)
    expected = json.loads((WRITTEN / "log.json").read_text())
    found = [row for row in trainer.state.log_history if row["step"] > 3 and "loss" in row]
    assert [row["step"] for row in found] == [row["step"] for row in expected] == [4, 5, 6]
    for row, before in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(before["loss"], rel=1e-3, abs=1e-5)
        assert row["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-3)
    assert trainer.spending.rollouts == 3 * 16


def test_as_it_was_written_it_is_refused_with_the_way_out(tmp_path):
    copied = Path(shutil.copytree(WRITTEN / "run", tmp_path / "run"))
    with pytest.raises(ValueError, match=r"older basis-rl.*`basis-rl convert .*checkpoint-3 RECIPE`"):
        build(copied).train(resume_from_checkpoint=True)
    (copied / "checkpoint-3" / "run_settings.json").unlink()
    (copied / "checkpoint-3" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"older basis-rl.*`basis-rl convert .*checkpoint-3 RECIPE`"):
        build(copied).train(resume_from_checkpoint=True)


def test_another_run_is_refused_by_name(folder):
    with pytest.raises(ValueError, match=r"num_generations.*Set them back"):
        build(folder, num_generations=2).train(resume_from_checkpoint=True)


def test_its_record_and_its_table_are_read(tmp_path, capsys):
    info = load_run_info(WRITTEN / "run")
    assert (info.baseline, info.sampler, info.step, info.max_steps) == ("basis_history", "variance", 3, 6)
    folder = shutil.copytree(WRITTEN / "table", tmp_path / "table")
    assert main(["convert", str(folder)]) == 2
    assert "--own_ids" in capsys.readouterr().err
    assert main(["convert", str(folder), "--own_ids"]) == 0
    table = ValueTable.load(folder)
    assert set(table.means.tolist()) == {0.5}
    assert set(table.prompt_ids) == set(sums()["prompt_id"])
