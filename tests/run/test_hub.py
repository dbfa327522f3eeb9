"""Pushes by the real `huggingface_hub` client to an endpoint of our own: what is sent, and what happens on failure."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from basis_rl.run.checkpoint import is_complete
from basis_rl.run.hub import Hub, Push
from tests.support.hub_endpoint import HubEndpoint

ROOT = Path(__file__).resolve().parents[2]
TOKEN, READER = "hf_AliceMayWriteHere0001", "hf_AliceMayOnlyRead0002"
STRATEGIES = ["end", "checkpoint", "all_checkpoints"]
FAST = ("checkpoint", "flaky", "dead", "wrong-token")


def named(names):
    """Parameters: what only the long launch has is for `make test-all`."""
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.long) for name in names]


def job(name, folder, **args):
    """A run of `tests.run.pushing`; what is no setting of `BasisConfig` stays outside `args`."""
    own = {key: args.pop(key) for key in ("resume", "push", "baseline") if key in args}
    return {"name": name, "out": str(folder / name), "args": {"hub_token": TOKEN, **args}, **own}


def python(hub, home, *arguments, token=None, launcher=()):
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    command = [sys.executable, *launcher, *map(str, arguments)]
    environment |= {**hub.environment(home, token), "CI": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done


@pytest.fixture(scope="module")
def hub():
    with HubEndpoint({TOKEN: ("alice", "write"), READER: ("alice", "read")}) as endpoint:
        yield endpoint
        assert endpoint.complaints == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


class Launches:
    """Runs of one process each, started when the first of their names is asked for: name -> what came of it."""

    def __init__(self, launch):
        self.launch, self.found = launch, {}

    def __getitem__(self, name):
        if name not in self.found:
            self.found |= self.launch(name in FAST)
        return self.found[name]


@pytest.fixture(scope="module")
def ran(hub, folder, tiny_path):
    """The runs: name -> what came of it; ``stderr`` of each is what all of its process said."""

    def third_is_there():
        first, third = (folder / "slow" / f"checkpoint-{step}" for step in (1, 3))
        until = time.monotonic() + 60
        while first.exists() and not is_complete(third) and time.monotonic() < until:
            time.sleep(0.05)

    faults = {
        "flaky": hub.fail(r"POST .*alice/flaky/commit", 503, times=2),
        "lfs": hub.fail(r"POST .*alice/flaky\.git/info/lfs", "drop", times=1),
        "dead": hub.fail(r"POST .*alice/dead/commit", 500),
        "slow": hub.fail(r"POST .*alice/slow/preupload", third_is_there, times=2),  # the first is before training
        "late": hub.fail(r'POST /api/repos/create .*"flaky"', 502, times=2),
    }
    history = {"baseline": "basis_history"}
    special = {"hub_private_repo": True, "hub_revision": "dev", "model_init_kwargs": {"token": TOKEN}}
    jobs = [
        job("end", folder, hub_strategy="end"),
        job("checkpoint", folder, hub_strategy="checkpoint", **special, **history),
        job("all_checkpoints", folder, hub_strategy="all_checkpoints"),
        job("flaky", folder, hub_strategy="checkpoint"),
        job("dead", folder, hub_retries=1),
        job("slow", folder, hub_strategy="all_checkpoints", save_total_limit=1, max_steps=4, **history),
        job("wrong-token", folder, hub_token="hf_NobodyKnowsThisToken"),
    ]

    def launch(fast):
        chosen = [json.dumps(job) for job in jobs if (job["name"] in FAST) == fast]
        done = python(hub, folder / "home", "-m", "tests.run.pushing", tiny_path, *chosen)
        outcome = json.loads(done.stdout.splitlines()[-1])
        return {name: {**came, "stderr": done.stderr} for name, came in outcome.items()} | {"faults": faults}

    return Launches(launch)


def trained(folder, name):
    return load_file(folder / name / "_as_trained" / "model.safetensors")


def same(weights, expected):
    return weights.keys() == expected.keys() and all(torch.equal(weights[key], expected[key]) for key in weights)


def sent(hub, name, path, revision="main"):
    return hub.files(f"models/alice/{name}", revision)[path]


@pytest.mark.parametrize("name", named(STRATEGIES))
def test_model_tokenizer_card_and_baseline_state_arrive(name, ran, hub, folder):
    assert ran[name]["pushed"]
    revision = "dev" if name == "checkpoint" else "main"
    files = hub.files(f"models/alice/{name}", revision)
    there = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "run.json"}
    assert there | {"training.png", "baseline_state.pt"} <= set(files)
    (folder / "pulled.safetensors").write_bytes(files["model.safetensors"])
    assert same(load_file(folder / "pulled.safetensors"), trained(folder, name))
    assert hub.repos[f"models/alice/{name}"].private == (name == "checkpoint")
    card = ModelCard(files["README.md"].decode())
    assert card.data.pipeline_tag == "text-generation"
    assert {"trl", "basis-rl"} <= set(card.data.tags)
    assert f"alice/{name}" in card.text


@pytest.mark.parametrize("name", named(["checkpoint", "all_checkpoints", "flaky", "slow"]))
def test_pushed_checkpoints_are_whole(name, ran, hub):
    assert ran[name]["pushed"]
    commits = hub.repos[f"models/alice/{name}"].branches["dev" if name == "checkpoint" else "main"]
    seen = 0
    for commit in commits:
        for place in {path.split("/")[0] for path in commit.files if "checkpoint" in path.split("/")[0]}:
            files = {path.removeprefix(f"{place}/") for path in commit.files if path.startswith(f"{place}/")}
            whole = {"model.safetensors", "optimizer.pt", "rng_state.pth", "phase_0.pt", "baseline_state.pt"}
            assert whole | {"trainer_state.json"} <= files
            assert "INCOMPLETE" not in files
            steps = json.loads(commit.files[f"{place}/trainer_state.json"].data)["global_step"]
            assert place in ("last-checkpoint", f"checkpoint-{steps}")
            seen += 1
    assert seen


@pytest.mark.long
def test_rotation_waits_for_the_upload(ran, hub, folder):
    assert ran["slow"]["pushed"]
    places = {path.split("/")[0] for path in hub.files("models/alice/slow") if path.startswith("checkpoint-")}
    assert places == {f"checkpoint-{step}" for step in (1, 2, 3, 4)}
    assert ran["faults"]["slow"].hit == 2


def test_no_token_is_sent_or_saved(ran, hub, folder):
    assert ran["checkpoint"]["pushed"]
    arguments = torch.load(folder / "checkpoint" / "training_args.bin", weights_only=False)
    assert arguments.hub_token is None
    assert "token" not in arguments.model_init_kwargs
    assert arguments.hub_model_id == "checkpoint"
    commits = [commit for repo in hub.repos.values() for branch in repo.branches.values() for commit in branch]
    content = [blob.data for commit in commits for blob in commit.files.values()]
    content += [hub.everything(), *hub.objects.values()]
    content += [path.read_bytes() for path in folder.rglob("*") if path.is_file() and "home" not in path.parts]
    for token in (TOKEN, READER):
        assert not any(token.encode() in data for data in content)
    control = folder / "control.bin"
    torch.save({"hub_token": TOKEN}, control)
    assert TOKEN.encode() in control.read_bytes(), "the search would not find a token that is there"


def test_what_fails_for_a_while_arrives(ran, hub, folder):
    assert ran["flaky"]["pushed"]
    assert ran["faults"]["flaky"].hit == 2
    assert ran["faults"]["lfs"].hit == 1
    assert "the Hub cannot be reached" in ran["flaky"]["stderr"]
    assert "last-checkpoint/optimizer.pt" in hub.files("models/alice/flaky")
    assert "alice/flaky" in sent(hub, "flaky", "README.md").decode()


def test_what_fails_for_good_is_a_warning(ran, hub, folder):
    assert ran["dead"]["step"] == 2
    assert ran["dead"]["pushed"] is None
    assert f"basis-rl push {folder / 'dead'}" in ran["dead"]["stderr"]
    assert same(load_file(folder / "dead" / "model.safetensors"), trained(folder, "dead"))
    assert list(hub.files("models/alice/dead")) == [".gitattributes"]


def test_a_refusal_is_one_message_before_anything_is_spent(ran, folder):
    error = ran["wrong-token"]["error"]
    assert "the Hub refuses 'wrong-token'" in error
    assert "hf auth login" in error
    assert "basis-rl push" in error
    assert not (folder / "wrong-token" / "model.safetensors").exists()


@pytest.mark.long
def test_a_kill_within_a_push_loses_no_checkpoint(hub, folder, tiny_path):
    """The resumed run would delete it before anything else is pushed: only one is kept."""
    name = "killed"
    settings = {"hub_strategy": "all_checkpoints", "save_total_limit": 1, "max_steps": 8}
    command = [sys.executable, "-m", "tests.run.pushing", str(tiny_path), json.dumps(job(name, folder, **settings))]
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    environment |= hub.environment(folder / "home")

    def kill():
        killed.kill()
        killed.wait()
        return "drop"

    hub.fail(rf"POST .*alice/{name}/commit", kill, times=1)
    with (folder / f"{name}.log").open("w") as log:
        killed = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        assert killed.wait(300) == -9, (folder / f"{name}.log").read_text()[-3000:]
    assert "checkpoint-1/optimizer.pt" not in hub.files(f"models/alice/{name}")
    again = json.dumps(job(name, folder, resume="auto", **settings))
    done = python(hub, folder / "home", "-m", "tests.run.pushing", tiny_path, again)
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome[name]["pushed"]
    files = hub.files(f"models/alice/{name}")
    assert {f"checkpoint-{step}/optimizer.pt" for step in range(1, 9)} <= set(files)
    assert not (folder / name / "checkpoint-1").exists()


def test_without_a_network_a_run_begins_all_the_same(caplog):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    hub = Hub(name="alice/x", folder=Path("runs/x"), wait_first=60.0)
    assert hub.connect() is None
    push = Push(message="m", files={"a": b"1"})
    assert hub.submit(push).result(timeout=30) is None
    assert "Each push will try again" in caplog.text
    assert "basis-rl push runs/x alice/x" in caplog.text


@pytest.fixture(scope="module")
def pulled(ran, hub, folder, tiny_path):
    """What another machine makes of it: `tests.run.pulling`."""
    assert all(ran[name]["pushed"] for name in ("end", "checkpoint", "slow"))
    done = python(hub, folder / "other", "-m", "tests.run.pulling", tiny_path, folder, token=TOKEN)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_what_was_pushed_loads_from_the_hub(pulled, folder):
    assert pulled["generated"] > 0
    assert same(load_file(folder / "from_hub" / "model.safetensors"), trained(folder, "end"))
    assert pulled["table"][0] == pulled["table"][1]
    assert pulled["clusters"][0] == pulled["clusters"][1]
    assert pulled["resumed_from"] == 2
    assert same(trained(folder, "resumed"), trained(folder, "slow"))


@pytest.mark.long
def test_recipe_evaluation_and_artefacts_are_on_the_card(pulled, hub, folder):
    assert pulled["codes"] == [0, 0]
    card = ModelCard(sent(hub, "cli", "README.md").decode())
    assert card.data.license == "apache-2.0", "of the base model's card"
    assert card.data.base_model == "alice/base"
    assert card.data.eval_results[0].metric_value == 0.5
    assert card.data.eval_results[0].dataset_type == "a/b"
    told = ("alice/table", pulled["table"][0], "alice/base (base)", "basis-rl train", "math-verify", "gong2026basis")
    assert [text for text in told if text not in card.text] == []
    recipe = sent(hub, "cli", "recipe.yaml").decode()
    assert recipe.strip() in card.text
    (reference,) = json.loads(sent(hub, "cli", "run.json"))["artefacts"]
    assert reference["source"] == "alice/table"
    assert reference["sha256"] == pulled["table"][0]
    assert {"results.json", "base_results.json", "metrics.jsonl", "training.png"} <= set(hub.files("models/alice/cli"))


@pytest.mark.long
def test_no_rank_waits_for_a_push_that_fails(hub, folder, tiny_path):
    dead = hub.fail(r"POST .*alice/two-dead/commit", 500)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    launcher += ["--num_processes", "2", "--main_process_port", "0"]
    settings = {"per_device_train_batch_size": 4, "ddp_backend": "gloo", "hub_retries": 1}
    jobs = [job("two-dead", folder, **settings), job("two-refused", folder, **{**settings, "hub_token": READER})]
    jobs.append(job("two-well", folder, **settings, hub_strategy="checkpoint"))
    done = python(hub, folder / "home", "-m", "tests.run.pushing", tiny_path, *map(json.dumps, jobs), launcher=launcher)
    outcome = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    assert outcome["two-dead"]["pushed"] is None
    assert dead.hit >= 4
    assert "the Hub refuses" in outcome["two-refused"]["error"]
    assert {"last-checkpoint/phase_0.pt", "last-checkpoint/phase_1.pt"} <= set(hub.files("models/alice/two-well"))
