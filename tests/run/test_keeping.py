"""Rollouts that are kept: whole files within their bound, without secrets, and none of a run that came before."""

import gzip
import json
import random
from pathlib import Path

import pytest

from basis_rl.run.rollouts import KeptRollouts, files, read

SECRET = "hf_Zq7Lm2Wk9Rt4Yb6Nc1Vd8Hs3"


def row(**given):
    return {
        "prompt_id": "p1", "prompt": "What is 1 + 1?", "completion": "2", "reward": 1.0, "rewards": {"exact": 1.0},
        "baseline": 0.5, "advantage": 0.5, "chance": None, "tokens": 3, "cut_off": False, "extra": {}, **given,
    }  # fmt: skip


def noise():
    return "".join(random.choices("abcdefghijklmnop", k=20_000))


def size(folder):
    return sum(path.stat().st_size for path in (folder / "rollouts").iterdir())


def test_what_is_written_is_read(tmp_path):
    kept = KeptRollouts(tmp_path, 1)
    kept.begin(0)
    odd = row(completion="\ud800 \x1b[31m [" + "[" * 100_000, reward=None, extra={"verdict": ("no", 1), "n": 2})
    kept.add([row(), odd])
    kept.write(3)
    # A step without a new batch.
    kept.write(4)
    assert list(files(tmp_path)) == [3]
    first, second = read(files(tmp_path).values())
    assert first == {"step": 3, **row()}
    assert second == {"step": 3, **odd, "extra": {"verdict": "('no', 1)", "n": 2}}


def test_the_oldest_steps_go(tmp_path):
    kept = KeptRollouts(tmp_path, 0.05)
    kept.begin(0)
    for step in range(1, 20):
        kept.add([row(completion=noise())])
        kept.write(step)
        assert size(tmp_path) <= 50_000
    found = list(files(tmp_path))
    assert found == list(range(20 - len(found), 20))
    assert len(found) >= 3
    # After a restart too.
    kept = KeptRollouts(tmp_path, 0.05)
    kept.begin(19)
    kept.add([row(completion=noise())])
    kept.write(20)
    assert size(tmp_path) <= 50_000
    assert list(files(tmp_path)) == [*found[1:], 20]
    # A step that is larger than the bound is not kept.
    kept.add([row(completion=noise()) for _ in range(10)])
    kept.write(21)
    assert size(tmp_path) <= 50_000


def test_later_steps_are_of_an_earlier_run(tmp_path):
    kept = KeptRollouts(tmp_path, 1)
    for step in (1, 2, 1_000_000):
        kept.add([row()])
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        kept.write(step)
    assert list(files(tmp_path)) == [1, 2, 1_000_000]
    kept.add([row()])
    kept.begin(1)
    kept.write(2)
    assert list(files(tmp_path)) == [1]
    kept.begin(0)
    assert files(tmp_path) == {}


def test_secrets_are_hidden_in_all_texts(tmp_path):
    kept = KeptRollouts(tmp_path, 1)
    said = f"export HF_TOKEN={SECRET}"
    kept.add([row(prompt=said, completion=said, rendered=said, extra={"why": said, "parts": [said]})])
    kept.write(1)
    (path,) = files(tmp_path).values()
    text = gzip.decompress(path.read_bytes()).decode()
    assert SECRET[3:] not in text
    assert "export" in text


def test_what_is_damaged_is_skipped(tmp_path):
    kept = KeptRollouts(tmp_path, 1)
    for step in (1, 2, 3):
        kept.add([row(completion=noise())])
        kept.write(step)
    paths = list(files(tmp_path).values())
    paths[0].write_bytes(paths[0].read_bytes()[:2000])
    paths[1].write_bytes(b"no gzip")
    odd = [{"step": 2}, [], {"step": 4, **row(reward="high")}, {"step": 4, **row(extra=None)}, {"step": 4, **row()}]
    with gzip.open(tmp_path / "rollouts" / "step-000004.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(each) + "\n" for each in odd))
    assert [each["step"] for each in read(list(files(tmp_path).values()))] == [3, 4]


def test_a_folder_that_cannot_be_written_ends_the_keeping_and_not_the_run(tmp_path, caplog):
    (tmp_path / "rollouts").write_text("a file")
    kept = KeptRollouts(tmp_path, 1)
    kept.begin(0)
    for step in (1, 2):
        kept.add([row()])
        kept.write(step)
    assert caplog.text.count("could not be written") == 1


def test_a_kill_leaves_no_half_file(tmp_path, monkeypatch):
    kept = KeptRollouts(tmp_path, 1)
    kept.add([row()])

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            kept.write(1)
    assert files(tmp_path) == {}
    assert len(list((tmp_path / "rollouts").iterdir())) == 1
    kept.begin(0)
    assert list((tmp_path / "rollouts").iterdir()) == []
