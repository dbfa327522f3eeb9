"""The benchmark of styles counts what each grader accepts of made-up rows."""

import json

import pytest

from benchmarks.reward import styles

ROWS = [
    ("gsm", 0, "sentence", "The answer is 1,000.", True),
    ("gsm", 0, "sentence", "The answer is 1,001.", False),
    ("gsm", 0, "tag", "<answer>1000</answer>", True),
    ("math", 1, "box", r"So \boxed{x+1}.", True),
    ("math", 1, "box", r"So \boxed{x+1} or \boxed{x+2}.", False),
    ("math", 0, "taken back", r"\boxed{0.5} is wrong, so \boxed{7", False),
]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "gsm.jsonl").write_text(json.dumps({"question": "?", "answer": "Think.\n#### 1000"}) + "\n")
    rows = [{"problem": "?", "solution": rf"So \boxed{{{gold}}}."} for gold in (r"\frac{1}{2}", "1+x")]
    (tmp_path / "math.json").write_text(json.dumps(rows))
    names = ("set", "row", "style", "completion", "right")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_recall_and_precision_of_each_grader_and_style(files, capsys):
    found = styles.main([str(files / "rows.jsonl"), "--data", str(files), "--quick"])
    assert found["accepted"]["full"] == [row[-1] for row in ROWS]
    assert found["styles"]["all"]["full"] == {"recall": 1.0, "precision": 1.0}
    # Math-Verify alone does not read the tag, and reads what is never closed.
    assert found["accepted"]["plain"][2] is False
    assert found["styles"]["tag"]["plain"] == {"recall": 0.0, "precision": None}
    assert found["styles"]["taken back"]["full"] == {"recall": None, "precision": None}
    assert found["styles"]["all"]["rows"] == len(ROWS)
    assert "| sentence | 2 | 1 | 100.0, 100.0 |" in capsys.readouterr().out


def test_shares_by_hand():
    assert styles.shares([True, True, False, False], [True, False, True, True]) == {"recall": 0.5, "precision": 1 / 3}
