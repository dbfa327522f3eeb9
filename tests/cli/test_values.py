"""`basis-rl values`: against servers, in parts, killed and resumed, pushed, and asked for what cannot be."""

import json
import os
import random
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from basis_rl.cli.main import main
from basis_rl.engine import client
from basis_rl.engine.client import request_seed
from basis_rl.values import ValueTable
from basis_rl.values.shards import Shards
from tests.support.fake_vllm import FakeServer
from tests.support.ranks import forked

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

OWN = {
    "dataset_kwargs": {"size": 80, "seed": 0, "min_terms": 2, "max_terms": 3, "max_digits": 2},
    "reward_funcs": ["tests.support.tiny.parity_reward"],
    "baseline": "basis",
    "objective": None,
    "num_generations": 1,
    "vllm_recovery_timeout": 0.3,
}


@pytest.fixture
def fake(tiny_path):
    with FakeServer(root=str(tiny_path), max_model_len=256) as running:
        yield running


@pytest.fixture
def recipe(recipe, tmp_path, fake):
    """Recipes of a table in ``tmp_path/values`` from the fake server."""
    own = {"values_servers": fake.url, "baseline_kwargs": {"values": str(tmp_path / "values")}}
    return lambda **changes: recipe(**{**own, **changes})


def content(folder):
    """All of a table but the day that it was made."""
    metadata = json.loads((folder / "metadata.json").read_text())
    del metadata["provenance"]["date"]
    return (folder / "rewards.parquet").read_bytes(), metadata


def wait_for_requests(fake, process, log, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not fake.requests:
        assert process.exitcode is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_table_from_servers_is_made_once_by_one_call_or_by_the_last_of_its_parts(recipe, tmp_path, fake, capsys):
    with FakeServer(root=fake.root, max_model_len=256) as other:
        path = recipe(values_servers=f"{fake.url}, {other.url}")
        assert main(["values", path]) == 0
        assert len(other.requests) > 0
    table = ValueTable.load(tmp_path / "values")
    assert all(len(table.rewards(p)) == 4 for p in table.prompt_ids)
    assert not (tmp_path / "values.partial").exists()
    first, asked = content(tmp_path / "values"), len(fake.requests)
    assert main(["values", recipe()]) == 0
    assert "This table already exists" in capsys.readouterr().out
    assert len(fake.requests) == asked
    again = recipe(baseline_kwargs={"values": str(tmp_path / "again")})
    for part in (1, 2, 0):
        assert not (tmp_path / "again").exists()
        assert main(["values", again, "--values_shard", f"{part}/3"]) == 0
    assert "Part 2 of 3 is done." in capsys.readouterr().out
    assert content(tmp_path / "again") == first
    assert main(["values", again, "--values_shard", "1/3"]) == 0
    assert "already exists" in capsys.readouterr().out
    assert main(["values", recipe(), "--seed", "5"]) == 0
    assert content(tmp_path / "values")[0] != first[0]
    assert main(["check", recipe()]) == 0, "training takes it, from whatever it was sampled"


def shards_of(folder):
    identity = json.loads(next(folder.glob("shard-*.jsonl")).open().readline())["identity"]
    return Shards(folder, identity)


def test_a_server_that_is_lost_costs_nothing_that_is_finished(recipe, tmp_path, fake, capsys, monkeypatch):
    monkeypatch.setattr(client, "_LONGEST_PAUSE", 0.1)
    path = recipe()
    fake.before = lambda number, body: fake.stop() if number == 20 else None
    fake.seconds = 0.02
    assert main(["values", path]) == 69
    said = capsys.readouterr().err
    assert re.search(r"No vLLM server is left at .*\. What is finished is kept in .*values\.partial", said, re.S)
    kept = len(list(shards_of(tmp_path / "values.partial").records()))
    fake.before = lambda number, body: None
    fake.start()
    fake.requests.clear()
    assert main(["values", path]) == 0
    assert kept > 0
    assert len(fake.requests) + kept == len(ValueTable.load(tmp_path / "values"))


class Hub:
    """Stands for the Hub's client: what is uploaded, or what goes wrong."""

    files: dict[str, str]

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, repo_id, **given):
        assert given["repo_type"] == "dataset"
        return f"https://hub/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, **given):
        Hub.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}


def test_it_is_pushed_with_a_card_and_a_failure_loses_nothing(recipe, tmp_path, fake, capsys, monkeypatch):
    path = recipe(values_push_to_hub="somebody/table", hub_token="hf_secret")

    def fails(self, **given):
        raise OSError("the Hub is away")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    with monkeypatch.context() as away:
        away.setattr(Hub, "upload_folder", fails)
        assert main(["values", path]) == 69
    said = capsys.readouterr().err
    assert re.search(r"could not be pushed to 'somebody/table' \(OSError: the Hub is away\). It is saved in", said)
    table, asked = ValueTable.load(tmp_path / "values"), len(fake.requests)
    assert main(["values", path]) == 0
    assert "Pushed to https://hub/somebody/table" in capsys.readouterr().out
    assert len(fake.requests) == asked, "only the push is done again"
    assert sorted(Hub.files) == ["README.md", "metadata.json", "rewards.parquet"]
    readme = Hub.files["README.md"].decode()
    assert f"for each of {len(table)} prompts" in readme
    assert str(tmp_path) not in readme
    assert Hub.files["rewards.parquet"] == (tmp_path / "values" / "rewards.parquet").read_bytes()


BAD = CASES["bad"]


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_one_message(case, recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("basis_rl.cli.values.get_token", lambda: None)
    arguments, message = BAD[case]
    assert main(["values", recipe(), *arguments]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("basis-rl: error:") == 1
    assert not (tmp_path / "values").exists()


def test_a_server_of_another_model_is_refused(recipe, fake, capsys):
    for other in ("Qwen/Qwen3-4B", f"{fake.root}-Base"):
        fake.root = other
        assert main(["values", recipe()]) == 2
        assert re.search(f"has the model .*{other}.*, not '", capsys.readouterr().err)


@pytest.mark.long
def test_killed_four_times_at_random_it_is_the_undisturbed_table(recipe, tmp_path, fake):
    """1,000 prompts x 32, `kill -9` at moments drawn anew each time; the server is the fake one, over real HTTP.

    The first time it is SIGTERM, which has an exit code and a message of its own.
    """
    changes = {"dataset_kwargs": {"size": 1050, "seed": 0, "min_terms": 3, "max_terms": 3, "max_digits": 3}}
    changes |= {"max_train_samples": 1000, "values_num_rollouts": 32}
    fake.seconds = 0.4
    assert main(["values", recipe(**changes)]) == 0
    whole = content(tmp_path / "values")
    path = recipe(**changes, baseline_kwargs={"values": str(tmp_path / "again")})
    moments, log = random.Random(), tmp_path / "log"
    kept: set[int] = set()
    kills, delays = 0, []
    while not (tmp_path / "again").exists():
        fake.requests.clear()
        process = forked(log, "basis_rl", "values", path)
        if kills < 4:
            wait_for_requests(fake, process, log)
            delays.append(moments.uniform(0.0, 3.0))
            time.sleep(delays[-1])
            assert process.exitcode is None, "it must be killed four times before its end"
            os.kill(process.pid, signal.SIGKILL if kills else signal.SIGTERM)
            process.join(120)
            assert process.exitcode == (-signal.SIGKILL if kills else 75), log.read_text()[-3000:]
            assert kills or "Stopped. What is finished is kept in" in log.read_text()
            kills += 1
        else:
            process.join(500)
            assert process.exitcode == 0, log.read_text()[-3000:]
        asked = {body["seed"] for body in fake.requests if "seed" in body}
        assert not asked & kept, "nothing that is finished is drawn again"
        if (tmp_path / "again.partial").exists():
            records = shards_of(tmp_path / "again.partial").records()
            found = {request_seed(42, 0, record.prompt_id) for record in records}
            assert kept <= found, "nothing is lost"
            kept = found
    print(f"killed {kills} times, {[round(delay, 2) for delay in delays]} s after the first request")
    assert kills == 4
    assert content(tmp_path / "again") == whole
    assert len(ValueTable.load(tmp_path / "again")) == 1000


def test_a_server_of_its_own_is_started_and_stopped(recipe, tmp_path, fake, monkeypatch):
    """A real one is that of test_eval.py, which is started by the same function."""
    seen = []

    @contextmanager
    def started(options):
        seen.append((options.model, options.max_model_len, options.extra[-2:]))
        yield SimpleNamespace(url=fake.url)
        seen.append("stopped")

    monkeypatch.setattr("basis_rl.engine.server.Server", started)
    path = recipe(values_servers=None, values_serve=True, vllm_max_model_length=128)
    assert main(["values", path, "--serve_args=--a 1"]) == 0
    assert seen == [(fake.root, 128, ["--a", "1"]), "stopped"]
    assert ValueTable.load(tmp_path / "values").provenance["sampler"] == "vllm"
