"""What is not a weight and changes all the same: the day in prompts, a synced reference, the place in a stream."""

import copy
import datetime
import json
import shutil

import pytest
from datasets import IterableDataset

from basis_rl.cli.main import main
from basis_rl.engine import template_day
from tests.cli.conftest import recipe as recipe
from tests.support.tiny import sums, tiny_tokenizer
from tests.trainer.test_resume import assert_same_end, run

DATED = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m.content }}{% endfor %}"
PLAIN = {"num_iterations": 1, "max_steps": 4, "save_steps": 2}
OWN = {"reward_funcs": ["tests.support.tiny.parity_reward"], "use_cpu": True}


@pytest.fixture
def today(monkeypatch):
    """Sets the day, as that of a process that begins then."""

    def begin(day):
        class Today(datetime.date):
            @classmethod
            def today(cls):
                return datetime.date.fromisoformat(day)

        monkeypatch.setattr(template_day, "date", Today)
        monkeypatch.setattr(template_day, "_fixed", [])

    before = template_day.chat_template_utils.datetime
    yield begin
    template_day.chat_template_utils.datetime = before


def test_a_run_that_is_resumed_on_another_day_has_the_prompts_of_its_first(today, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = DATED
    today("2026-11-25")
    whole = run(tmp_path / "a", "rloo", processing_class=copy.deepcopy(tokenizer), **PLAIN)
    rendered = whole.processing_class.apply_chat_template(sums(1)[0]["prompt"], tokenize=False)
    assert rendered.startswith("25 Nov 2026")
    shutil.copytree(tmp_path / "a" / "checkpoint-2", tmp_path / "b" / "checkpoint-2")
    today("2026-11-27")
    again = run(tmp_path / "b", "rloo", resume="auto", processing_class=copy.deepcopy(tokenizer), **PLAIN)
    assert_same_end(whole, again)
    assert template_day.template_day() == "2026-11-25"


def test_the_command_renders_by_the_day_of_the_checkpoint_before_it_checks(today, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = recipe(save_strategy="steps", save_steps=1, max_steps=1)
    today("2026-11-25")
    assert main(["train", path]) == 0
    today("2026-11-26")
    seen = []
    monkeypatch.setattr(
        "basis_rl.cli.train.build_trainer", lambda recipe: seen.append(template_day.template_day()) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        main(["train", path, "--resume_from_checkpoint", "auto"])
    assert seen == ["2026-11-25"]


SYNCED = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, **PLAIN}


def test_a_reference_that_changes_is_in_the_checkpoint(tmp_path, tiny_path):
    settings = {**SYNCED, "model": tiny_path}
    whole = run(tmp_path / "a", "rloo", **settings)
    shutil.copytree(tmp_path / "a" / "checkpoint-2", tmp_path / "b" / "checkpoint-2")
    shutil.copytree(tmp_path / "a" / "checkpoint-2", tmp_path / "c" / "checkpoint-2")
    again = run(tmp_path / "b", "rloo", resume="auto", **settings)
    assert_same_end(whole, again)
    assert any(row.get("kl") for row in whole.state.log_history)
    for name in ("reference.pt", "manifest.json"):
        (tmp_path / "c" / "checkpoint-2" / name).unlink()
    with pytest.raises(ValueError, match=r"has no reference\.pt"):
        run(tmp_path / "c", "rloo", resume="auto", **settings)


@pytest.mark.parametrize("rows", [16, 8])
def test_a_stream_is_resumed_exactly_or_not_at_all(rows, tmp_path):
    """4 prompts a generation batch of 2 steps: 16 rows are 8 steps, 8 rows begin anew after the fourth."""
    settings = {**PLAIN, "max_steps": 8, "save_steps": 6}
    stream = IterableDataset.from_generator(lambda: iter(sums(rows)))
    whole = run(tmp_path / "a", "rloo", train_dataset=stream, **settings)
    shutil.copytree(tmp_path / "a" / "checkpoint-6", tmp_path / "b" / "checkpoint-6")
    epoch = json.loads((tmp_path / "a" / "checkpoint-6" / "trainer_state.json").read_text())["epoch"]
    assert (epoch >= 1) == (rows == 8)
    if rows == 8:
        with pytest.raises(ValueError, match="Load the dataset without streaming"):
            run(tmp_path / "b", "rloo", resume="auto", train_dataset=stream, **settings)
    else:
        assert_same_end(whole, run(tmp_path / "b", "rloo", resume="auto", train_dataset=stream, **settings))
