"""What is kept on disk: whole files, locks, lines that a kill cut off, versions, and settings that differ."""

import errno
import os

import pytest
import torch

from basis_rl.run.artefacts import differences, lock, read_lines, versions, write_whole


def test_versions_and_differences():
    assert versions("torch", "no-such-package-anywhere") == {"torch": torch.__version__}
    found = differences({"a": 1, "b": [1], "same": None}, {"c": "x", "a": 2, "b": [1]})
    assert found == ["a: 1, now 2", 'c: null, now "x"']


def test_a_file_is_replaced_as_a_whole_and_is_on_the_disk_before(tmp_path, monkeypatch):
    path, seen = tmp_path / "f.json", []
    write_whole(path, "old é\n")
    watched = lambda file: seen.append((path.read_text(encoding="utf-8"), os.fstat(file).st_size))  # noqa: E731
    monkeypatch.setattr(os, "fsync", watched)
    write_whole(path, "newer\n")
    assert seen == [("old é\n", 6)], "all of it is forced to disk while the old file still stands"
    assert path.read_text() == "newer\n"
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "lost")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"f.json": "newer\n"}


def test_lines_that_are_no_objects_are_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n[1]\n\n{"a": "x\xe2\x80\xa8y"}\n{"a": \xff}\n{"a": 3}\n{"a": 4')
    assert [row["a"] for row in read_lines(path)] == [1, "x\u2028y", 3]
    assert list(read_lines(tmp_path / "nowhere")) == []


def test_a_lock_is_one_holders_until_it_closes(tmp_path):
    first, second = (open(tmp_path / "lock", "w") for _ in range(2))  # noqa: SIM115
    assert lock(first.fileno(), wait=False)
    assert not lock(second.fileno(), wait=False)
    first.close()
    assert lock(second.fileno(), wait=True)
    second.close()
