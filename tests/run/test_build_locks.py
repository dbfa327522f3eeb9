"""Compilation locks: those of the dead are removed, those of the living are not."""

import os
import subprocess
import sys
import time

import pytest
from torch.utils.file_baton import FileBaton

from basis_rl.run.run_lock import break_abandoned_locks


def lock(folder, name, age):
    path = folder / "py311" / name / "lock"
    path.parent.mkdir(parents=True)
    baton = FileBaton(str(path))
    assert baton.try_acquire()
    os.utime(path, (time.time() - age,) * 2)
    return path, baton


def test_only_old_locks_that_nobody_holds_are_removed_and_a_young_one_is_waited_for(tmp_path, capsys):
    held, baton = lock(tmp_path, "held", age=9999)
    for name, age in (("old", 9999), ("young", 0)):
        dead, abandoned = lock(tmp_path, name, age)
        os.close(abandoned.fd)
        with pytest.warns(UserWarning, match=f"{name}/lock"):
            assert break_abandoned_locks(tmp_path, patience=0.5) == [dead]
        assert ("may be compiling" in capsys.readouterr().out) == (name == "young")
    assert held.exists()
    baton.release()


def test_a_lock_from_before_the_clock_was_set_back_is_an_old_one(tmp_path):
    dead, abandoned = lock(tmp_path, "future", age=-9999)
    os.close(abandoned.fd)
    with pytest.warns(UserWarning, match="future/lock"):
        assert break_abandoned_locks(tmp_path, patience=300.0) == [dead]


def test_another_process_that_compiles_is_left_alone(tmp_path):
    path = tmp_path / "lock"
    # What torch's FileBaton does, without torch: it makes the file, and holds it open.
    script = f"import time; held = open({str(path)!r}, 'x'); print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    try:
        assert break_abandoned_locks(tmp_path, patience=0.0) == []
    finally:
        process.kill()
        process.wait()
    with pytest.warns(UserWarning, match="Removed"):
        assert break_abandoned_locks(tmp_path, patience=0.0) == [path]
