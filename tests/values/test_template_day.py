"""A chat template that writes today's date: a table has that of its first day, and the runs that use it."""

import shutil

import pytest

from basis_rl.baselines import BasisHistory
from basis_rl.cli.main import main
from basis_rl.values import ValueTable
from basis_rl.values.build import build_table
from basis_rl.values.sources import ModelSource
from tests.cli.conftest import SETTINGS
from tests.cli.conftest import recipe as recipe
from tests.support.tiny import sums, tiny_model, tiny_tokenizer, tiny_trainer
from tests.trainer.test_resume_inputs import DATED
from tests.trainer.test_resume_inputs import today as today
from tests.values.test_build import plan, rewards


def dated():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = DATED
    return tokenizer


def source():
    tokenizer = dated()
    return ModelSource(tiny_model(tokenizer), tokenizer, 7)


def shards(folder, today, days):
    for part, day in enumerate(days):
        today(day)
        table = build_table(source(), plan(16), folder, (part, len(days)))
    return table


@pytest.fixture
def table(today, tmp_path):
    """Begun on the 25th, finished on the 27th."""
    return shards(tmp_path / "later", today, ("2026-11-25", "2026-11-27"))


def test_a_build_goes_on_after_midnight_as_it_would_have_before(table, today, tmp_path):
    whole = shards(tmp_path / "whole", today, ("2026-11-25", "2026-11-25"))
    assert rewards(table) == rewards(whole)
    assert table.fingerprints == whole.fingerprints
    assert table.template_day == whole.template_day == "2026-11-25"
    other = shards(tmp_path / "other", today, ("2026-11-26", "2026-11-26"))
    assert not set(other.fingerprints.values()) & set(table.fingerprints.values())


def test_a_run_has_the_day_of_its_table_also_when_it_is_resumed(table, today, tmp_path):
    path = table.save(tmp_path / "table")

    def run(folder, values, **settings):
        saving = {"save_strategy": "steps", "save_steps": 1, "num_iterations": 1}
        return tiny_trainer(folder, BasisHistory(values), processing_class=dated(), **saving, **settings)

    today("2026-11-28")
    first = run(tmp_path / "run", path, max_steps=1)
    rendered = first.processing_class.apply_chat_template(sums(1)[0]["prompt"], tokenize=False)
    assert rendered.startswith("25 Nov 2026")
    first.train()
    today("2026-11-29")
    again = run(tmp_path / "run", path, max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    without = ValueTable(
        rewards(table), fingerprints=table.fingerprints, provenance={**table.provenance, "template_day": None}
    )
    today("2026-11-28")
    with pytest.raises(ValueError, match="16 prompts are rendered otherwise"):
        run(tmp_path / "other", without)


def test_the_command_finds_its_table_and_its_parts_on_another_day(today, recipe, tmp_path, capsys):
    tokenizer = dated()
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    own = {"model_name_or_path": str(tmp_path / "model"), "reward_funcs": ["tests.support.tiny.parity_reward"]}
    data = {"dataset_kwargs": {**SETTINGS["dataset_kwargs"], "size": 24}}
    folder = tmp_path / "values"
    path = recipe(
        **own, **data, baseline="basis", objective=None, num_generations=1, baseline_kwargs={"values": str(folder)}
    )
    for part, day in enumerate(("2026-11-25", "2026-11-26")):
        today(day)
        assert main(["values", path, "--values_shard", f"{part}/2"]) == 0
    assert ValueTable.load(folder).template_day == "2026-11-25"
    for day in ("2026-11-27", "2026-11-25"):
        today(day)
        capsys.readouterr()
        assert main(["values", path]) == 0
        assert "This table already exists" in capsys.readouterr().out
    today("2026-11-28")
    assert main(["train", path, "--max_steps", "1"]) == 0
    shutil.rmtree(folder)
    today("2026-11-28")
    assert main(["values", path]) == 0
    assert ValueTable.load(folder).template_day == "2026-11-28"
