"""The benchmark of styles counts what each grader accepts of made-up rows."""

import json

import pytest

from benchmarks.reward import styles

ROWS = {
    "sentence": [("gsm", 0, "The answer is 1,000.", True), ("gsm", 0, "The answer is 1,001.", False)],
    "marked": [
        ("gsm", 0, "<answer>1000</answer>", True),
        ("math", 1, r"So \boxed{x+1}.", True),
        ("math", 1, r"So \boxed{x+1} or \boxed{x+2}.", False),
    ],
    "taken_back": [
        ("math", 0, r"\boxed{0.5} is wrong, so \boxed{7", False),
        (None, None, r"\boxed{7} is wrong", False),
    ],
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "gsm.jsonl").write_text(json.dumps({"question": "?", "answer": "Think.\n#### 1000"}) + "\n")
    rows = [{"problem": "?", "solution": rf"So \boxed{{{gold}}}."} for gold in (r"\frac{1}{2}", "1+x")]
    (tmp_path / "math.json").write_text(json.dumps(rows))
    names = ("set", "row", "completion", "right")
    for name, chosen in ROWS.items():
        lines = [json.dumps(dict(zip(names, row, strict=True), gold="8", style="any")) for row in chosen]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_recall_and_precision_of_each_grader_and_set(files, capsys):
    found = styles.main([*(str(files / f"{name}.jsonl") for name in ROWS), "--data", str(files), "--quick"])
    assert found["accepted"]["full"] == [row[-1] for rows in ROWS.values() for row in rows]
    assert found["sets"]["sentence"]["full"] == found["sets"]["marked"]["full"] == {"recall": 1.0, "precision": 1.0}
    # Math-Verify alone does not read the tag.
    assert found["sets"]["marked"]["plain"]["recall"] == 0.5
    assert found["sets"]["taken_back"]["full"] == {"recall": None, "precision": None}
    assert found["rows"] == 7
    assert "| sentence | 2 | 1 | 100.0, 100.0 |" in capsys.readouterr().out
