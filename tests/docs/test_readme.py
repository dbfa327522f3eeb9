"""The README: its Python trains, and its commands exist."""

import os
import re
import runpy
import shlex
from pathlib import Path

import pytest

from basis_rl.cli.main import COMMANDS
from tests.support.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_its_commands_exist():
    assert set(re.findall(r"^basis-rl +(\w+)", README, re.M)) <= set(COMMANDS)
    for line in re.findall(r"^basis-rl (?!init).*", README, re.M):
        for word in shlex.split(line, comments=True):
            if word.endswith(".yaml"):
                assert (ROOT / word).is_file(), word


@pytest.mark.long
def test_its_python_trains(tmp_path, monkeypatch):
    """As it stands, but for the model: one of a few thousand parameters is where `make quickstart` leaves its own."""
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    folder = tmp_path / "runs" / "quickstart" / "warm_start"
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "block.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    trainer = runpy.run_path("block.py", run_name="__main__")["trainer"]
    assert trainer.state.global_step == 20
    assert any("sampler/believed" in row for row in trainer.state.log_history)
