"""The job script of `examples/slurm`, with commands of the cluster that only say how they were called."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "slurm" / "train.sbatch"
STUBS = {
    "scontrol": '#!/bin/bash\n[ "$1" = show ] && printf "node%s\\n" 0 1 2 || echo "$@" > requeued\n',
    # Options of srun itself all have a `=` or are --overlap.
    "srun": '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\necho "$SRUN_CPUS_PER_TASK" >> cpus\n'
    'SLURM_PROCID=0 exec "$@"\n',
    "accelerate": '#!/bin/bash\nprintf "%s\\n" "$@" > trained\nuntil [ -e "$WAITS" ]; do sleep 0.1; done\nexit 75\n',
    "basis-rl": '#!/bin/bash\nprintf "%s\\n" "$@" > served\nexec sleep 60\n',
}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Starts the script with a recipe in a folder of its own, on a cluster of three nodes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    jobs = []

    def start(waits_for, **recipe):
        path = tmp_path / "my recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        given = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[0-2]", "SLURM_JOB_ID": "7"}
        given["SLURM_CPUS_PER_TASK"] = "48"
        given |= {"WAITS": str(waits_for), "PYTHONPATH": os.pathsep.join(sys.path)}
        jobs.append(subprocess.Popen(["bash", SCRIPT, str(path)], env={**os.environ, **given}, start_new_session=True))
        return jobs[-1]

    yield start
    for each in jobs:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_job_with_blanks_in_its_paths_stops_and_requeues_itself(job, tmp_path):
    output = tmp_path / "runs of mine" / "a"
    running = job(output / "STOP", model_name_or_path="a model/of mine", output_dir=str(output), max_steps=3)
    until = time.monotonic() + 20
    while not (tmp_path / "trained").exists() and time.monotonic() < until:
        time.sleep(0.05)
    running.send_signal(signal.SIGUSR1)
    assert running.wait(20) == 75
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert (tmp_path / "served").read_text().splitlines()[:4] == ["serve", "a model/of mine", "--host", "node0"]
    words = (tmp_path / "trained").read_text().splitlines()
    assert words[words.index("train") + 1] == str(tmp_path / "my recipe.yaml")
    assert words[words.index("--num_processes") + 1] == "16"
    assert words[words.index("--main_process_ip") + 1] == "node1"
    assert "http://node0:8000" in words
    assert (tmp_path / "cpus").read_text() == "48\n48\n", "srun does not ask sbatch"


def test_a_recipe_without_a_folder_starts_nothing(job, tmp_path):
    assert job(tmp_path / "never", model_name_or_path="m").wait(20) == 2
    assert not (tmp_path / "served").exists()
