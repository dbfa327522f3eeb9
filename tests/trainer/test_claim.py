"""One run per folder: a lock that goes with the process, and ranks that do not outlive their launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from basis_rl.trainer import checkpoint, claim
from basis_rl.trainer.claim import held

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import fcntl, json, os, sys
file = os.open(sys.argv[1] + "/.claim", os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, json.dumps({"pid": os.getpid(), "host": "there", "since": "today"}).encode())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_told_who_has_the_folder_and_a_kill_frees_it(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ValueError, match=rf"still going on: process {other.pid} on there, since today"),
            held(tmp_path),
        ):
            pass
        other.kill()
        other.wait()
        with held(tmp_path):
            assert str(os.getpid()) in (tmp_path / ".claim").read_text()


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
        ((descriptor, _),) = claim._held.values()
        child = os.fork()
        if child == 0:
            try:
                os.fstat(descriptor)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.fstat(descriptor)


@pytest.mark.nightly  # it failed two times of five, which was not understood yet
@pytest.mark.long
def test_ranks_end_with_a_launcher_that_was_killed(tmp_path, tiny_path):
    """They write a checkpoint, free the folder, and leave no process behind."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    launcher += ["--num_processes", "2", "--main_process_port", "0", "-m", "tests.trainer.ill_fated"]
    process = subprocess.Popen(
        [*launcher, str(tmp_path), str(tiny_path), "1", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("0 at"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60
    while subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, check=False).stdout:
        assert time.monotonic() < until, "ranks were left behind"
        time.sleep(0.2)
    said = process.stdout.read()
    process.stdout.close()
    found = checkpoint.newest(tmp_path)
    assert found is not None, said[-3000:]
    assert int(found.name.split("-")[1]) < 40, "they trained to the end"
    with held(tmp_path):
        pass
