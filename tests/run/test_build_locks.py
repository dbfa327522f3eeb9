"""Compilation locks: those of the dead are removed, those of the living are not."""

import os
import subprocess
import sys
import time
import warnings

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


def test_only_old_locks_that_nobody_holds_are_removed(tmp_path):
    held, baton = lock(tmp_path, "held", age=9999)
    dead, abandoned = lock(tmp_path, "dead", age=9999)
    os.close(abandoned.fd)
    with pytest.warns(UserWarning, match="dead/lock"):
        assert break_abandoned_locks(tmp_path) == [dead]
    assert held.exists()
    baton.release()


def test_a_young_one_is_waited_for(tmp_path, capsys):
    dead, abandoned = lock(tmp_path, "dead", age=0)
    os.close(abandoned.fd)
    with pytest.warns(UserWarning, match="dead/lock"):
        assert break_abandoned_locks(tmp_path, patience=0.5) == [dead]
    assert "may be compiling" in capsys.readouterr().out


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


def test_no_folder_no_locks(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert break_abandoned_locks(tmp_path / "none") == []
