"""One run per folder: a lock that goes with the process, and ranks that do not outlive their launcher."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from basis_rl.run import checkpoint, run_lock
from basis_rl.run.run_lock import held
from tests.support.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import fcntl, json, os, sys
file = os.open(sys.argv[1] + "/.claim", os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, json.dumps({"pid": os.getpid(), "host": "there", "since": "today"}).encode())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("what", ["a dangling link", "a link to itself", "a file", "below a file"])
def test_what_cannot_be_a_folder_is_named(what, tmp_path):
    output = tmp_path / "run"
    if what == "a dangling link":
        output.symlink_to(tmp_path / "scratch that was cleaned")
    elif what == "a link to itself":
        output.symlink_to(output)
    else:
        output.write_text("mine")
    asked = output / "a" if what == "below a file" else output
    said = rf"output_dir: '{output}' (is a link to .* which is not there|is not a folder)\. Remove it"
    with pytest.raises(ValueError, match=said), held(asked):
        pass
    assert output.is_symlink() or output.read_text() == "mine"
    output.unlink()
    with held(asked):
        assert asked.is_dir()


def test_a_run_has_a_name_that_its_resumes_have_and_other_folders_have_not(tmp_path):
    def name(folder):
        with held(folder) as run, held(folder) as again:
            assert run == again
            return run

    one = name(tmp_path / "one")
    assert name(tmp_path / "one") == one
    assert name(tmp_path / "two") != one


@pytest.mark.parametrize("what", ["shared", "late", "empty", "of an earlier start"])
def test_every_rank_has_to_see_what_the_first_has_written(what, tmp_path, monkeypatch):
    """The second rank's folder may be another one; a network file system may take a while."""
    monkeypatch.setattr(checkpoint, "PATIENCE", 1.5)
    ranks = Ranks(2)
    folders = [tmp_path / "first", tmp_path / "first" if what == "shared" else tmp_path / "second"]
    if what == "of an earlier start":
        with held(folders[0]):
            pass
        shutil.copytree(folders[0], folders[1])
    _, owner = run_lock._take(folders[0].absolute())

    def appear():
        if what == "late":
            time.sleep(0.7)
            shutil.copytree(folders[0], folders[1])

    later = threading.Thread(target=appear)
    later.start()
    seen = ranks.run(lambda rank: run_lock._sees(folders[rank], owner))
    later.join()
    run_lock._give_back(folders[0].absolute())
    assert seen == [True, what in ("shared", "late")]


def test_a_rank_that_sees_another_folder_stops_all(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "gathered", lambda mine: [mine, "far away"])
    refused = rf"output_dir '{tmp_path}' on \S+, .* is not the folder .* on far away"
    with pytest.raises(ValueError, match=refused), held(tmp_path):
        pass
    monkeypatch.undo()
    with held(tmp_path):
        pass


def test_a_second_run_is_told_who_has_the_folder_and_a_kill_frees_it(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"process {other.pid} on there, since today"), held(tmp_path):
            pass
        other.kill()
        other.wait()
        with held(tmp_path):
            assert str(os.getpid()) in (tmp_path / ".claim").read_text()


def test_what_an_earlier_owner_wrote_is_gone_and_no_descriptor_is_left(tmp_path):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    (tmp_path / ".claim").write_text(json.dumps({"pid": 1, "host": "there" * 99, "since": "today"}))
    with held(tmp_path):
        assert json.loads((tmp_path / ".claim").read_text())["pid"] == os.getpid()
        assert descriptors() == before + 1
    assert descriptors() == before
    with (tmp_path / ".claim").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is still going on"), held(tmp_path):
            pass
        assert descriptors() == before + 1  # `other`
    with held(tmp_path):
        pass


def test_it_is_held_to_the_end_of_the_outermost_block(tmp_path):
    probe = [sys.executable, "-c", "import fcntl, sys; fcntl.flock(open(sys.argv[1] + '/.claim'), 6)", str(tmp_path)]

    def is_free():
        return subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode == 0

    with held(tmp_path):
        with held(tmp_path):
            assert not is_free()
        assert not is_free()
    assert is_free()


def test_a_forked_child_does_not_hold_it(tmp_path):
    """Such as a worker of a data loader: it may outlive its parent."""
    with held(tmp_path):
        ((descriptor, *_),) = run_lock._held.values()
        child = os.fork()
        if child == 0:
            try:
                os.fstat(descriptor)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.fstat(descriptor)


ORPHAN = """
import os, signal, sys
os.environ["LOCAL_RANK"] = "0"
from basis_rl.run import run_lock
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told") and os._exit(0))
print("imported", flush=True)
sys.stdin.readline()
run_lock.end_with_launcher()
print("trains", flush=True)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize(("dies", "said"), [(True, "told"), (False, "trains\n")])
def test_a_rank_whose_launcher_ended_before_the_training_began_is_told_at_once(dies, said):
    command = [sys.executable, "-c", LAUNCHER, ORPHAN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as launcher:
        assert launcher.stdout.readline() == "imported\n"
        if dies:
            launcher.kill()
            launcher.wait()
        launcher.stdin.write("\n")
        launcher.stdin.close()
        assert launcher.stdout.read() == said


@pytest.mark.nightly  # until it has passed ten times in a row in its present form
@pytest.mark.long
def test_ranks_end_with_a_launcher_that_was_killed(tmp_path, tiny_path):
    """They write a checkpoint, free the folder, and leave no process behind."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    launcher += ["--num_processes", "2", "--main_process_port", "0", "-m", "tests.trainer.ill_fated"]
    output, log = tmp_path / "run", tmp_path / "log"
    command = [*launcher, str(output), str(tiny_path), "1", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    wait_for(lambda: re.search(r"0 at \d", log.read_text()) or process.poll() is not None, log)
    assert process.poll() is None, log.read_text()[-3000:]
    ranks = having(output) - {process.pid}
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not having(output), log)
    found = checkpoint.newest(output)
    assert found is not None, log.read_text()[-3000:]
    assert int(found.name.split("-")[1]) < 40, "they trained to the end"
    with held(output):
        pass


def wait_for(there, log, seconds=300):
    """Until it is there. Ranks print without a buffer, so what two of them say may share a line."""
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.05)


def having(folder):
    """The processes that live and name `folder` on their command line."""
    found = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False)
    return set(map(int, found.stdout.split()))
