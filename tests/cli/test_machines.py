"""Two ranks on two machines, which are network namespaces here: a link that is cut, and folders that are not shared."""

import json
import multiprocessing.connection
import re
import time
from pathlib import Path

import pytest

from basis_rl.run import checkpoint
from tests.support.processes import wait_until
from tests.support.ranks import CPU, MACHINE, OWN_FOLDERS, ROOT, environment, forked

pytestmark = pytest.mark.long
# Seconds beside the timeout of their collectives until ranks must have ended, and what a loaded machine takes.
GRACE, LOAD = 30.0, 15.0


class Apart:
    """``basis-rl train`` on one rank on each machine."""

    def __init__(self, machines, folder, config, *arguments, own=("", "")):
        shared = environment(ROOT / config, 2) | {"MASTER_ADDR": machines.addresses[0]}
        self.logs = [folder / f"log{rank}" for rank in (0, 1)]
        self.ranks = []
        for rank, log in enumerate(self.logs):
            mine = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CI": "1", OWN_FOLDERS: own[rank]}
            mine |= {MACHINE: machines.names[rank], "GLOO_SOCKET_IFNAME": machines.interfaces[rank]}
            # `shared` has the caller's whole environment: in CI that has CI already.
            self.ranks.append(forked(log, "tests.cli.on_cpus", "train", *arguments, **(shared | mine)))

    def ended(self, seconds):
        """Exit codes of the ranks, once all have ended; each that has not by then is None."""
        deadline = time.monotonic() + seconds
        running = {rank.sentinel for rank in self.ranks}
        while running and (left := deadline - time.monotonic()) > 0:
            running -= set(multiprocessing.connection.wait(running, left))
        codes = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.join()
        return codes

    def said(self):
        return [log.read_text() for log in self.logs]


def step_of(output):
    lines = (output / "metrics.jsonl").read_text().splitlines() if (output / "metrics.jsonl").exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def until_step(apart, output, number):
    def there():
        assert all(rank.exitcode is None for rank in apart.ranks), "\n".join(apart.said())[-5000:]
        return step_of(output) >= number

    wait_until(there, 600)


@pytest.mark.parametrize("config", [CPU, "accelerate_configs/zero3_cpu.yaml", "fsdp2"])
def test_a_link_that_is_cut_ends_both_ranks_within_the_timeout_by_one_line(config, machines, recipe, tmp_path):
    if config == "fsdp2":
        text = (ROOT / "accelerate_configs/fsdp2.yaml").read_text()
        config = tmp_path / "fsdp2.yaml"
        config.write_text(text.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
    path = recipe(max_steps=1000000, ddp_timeout=15, save_strategy="steps", save_steps=2, save_total_limit=1)
    apart = Apart(machines, tmp_path, config, path)
    output = tmp_path / "out"
    until_step(apart, output, 4)
    machines.cut()
    cut = time.time()
    codes = apart.ended(15 + GRACE + LOAD)
    said = apart.said()
    assert codes == [68, 68], "\n".join(said)[-5000:]
    for text, other in zip(said, (1, 0), strict=True):
        assert "Traceback" not in text
        (line,) = re.findall(r"^basis-rl: error: .*$", text, re.MULTILINE)
        assert re.search(rf"Silent: rank {other} on \S+ \({machines.addresses[other]}\) since \d\d:\d\d:\d\d", line)
        assert "--resume_from_checkpoint auto" in line
        since = time.strptime(re.search(r"since (\S+?):? ", line)[1][:8], "%H:%M:%S")
        assert abs(since.tm_min * 60 + since.tm_sec - time.localtime(cut).tm_min * 60 - time.localtime(cut).tm_sec) < 10
    assert checkpoint.newest(output) is not None


def test_a_cut_of_20_seconds_goes_on(machines, recipe, tmp_path):
    path = recipe(max_steps=1000000, ddp_timeout=120, save_strategy="steps", save_steps=100000)
    apart = Apart(machines, tmp_path, CPU, path)
    output = tmp_path / "out"
    until_step(apart, output, 2)
    machines.cut()
    time.sleep(20)
    before = step_of(output)
    machines.join()
    until_step(apart, output, before + 3)
    (output / "STOP").touch()
    assert apart.ended(120) == [75, 75], "\n".join(apart.said())[-5000:]
    assert checkpoint.newest(output) is not None


def test_folders_that_are_not_shared_are_refused_by_all_ranks(machines, recipe, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    apart = Apart(machines, tmp_path, CPU, recipe(), own=("", str(output)))
    codes = apart.ended(checkpoint.PATIENCE + 300)
    said = apart.said()
    assert codes == [2, 2], "\n".join(said)[-5000:]
    for text in said:
        assert "Traceback" not in text
        assert re.search(rf"output_dir '{output}' on \S+, the machine of the first rank, is not the folder", text)
    assert not Path(output / "metrics.jsonl").exists()


def test_a_rank_that_fails_at_its_start_ends_the_other(machines, recipe, tmp_path):
    """Its machine lacks the model: it says so, and the other does not wait for it."""
    model = tmp_path / "model"
    path = recipe()
    text = Path(path).read_text()
    source = re.search(r"model_name_or_path: (\S+)", text)[1]
    model.symlink_to(source)
    Path(path).write_text(text.replace(source, str(model)))
    apart = Apart(machines, tmp_path, CPU, path, "--ddp_timeout", "60", own=("", source))
    codes = apart.ended(60 + GRACE + 300)
    assert codes == [68, 2], "\n".join(apart.said())[-5000:]
    assert "Traceback" not in "".join(apart.said())
