"""Pushes without a Hub: what is in a commit, what is repeated and when it is given up, what `basis-rl push` makes."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from transformers.trainer_utils import HubStrategy

from basis_rl.cli.main import main
from basis_rl.run import hub as run_hub
from basis_rl.run.hub import Hub, Push, files_of_checkpoint, files_of_run, is_refusal
from basis_rl.run.record import load_run_info, save_run_info
from basis_rl.trainer.publish import Publisher
from tests.report.test_card import INFO, entry

OF_RUN = ["README.md", "config.json", "model.safetensors", "runs/events.out.tfevents.1", "run.json"]
NOT_OF_RUN = ["STOP", "_own/x", "vllm.log", "checkpoint-2/model.safetensors", "last-checkpoint/x", ".hidden", "a/.b"]
NOT_OF_RUN += ["half.part", "table.old"]
OF_MODEL = ["model.safetensors", "config.json", "baseline_state.pt"]
TO_RESUME = ["optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json", "baseline_module.pt"]


def write(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def refusal(status):
    return HfHubHTTPError("no", response=SimpleNamespace(status_code=status, headers={}, request=None))


class Api:
    """Takes commits; `answers` are what the next ones get: an error, or None."""

    endpoint = "https://hub"

    def __init__(self, answers=(), there=None):
        self.answers, self.there, self.commits, self.tries = list(answers), there, [], 0

    def create_repo(self, name, **kwargs):
        return SimpleNamespace(repo_id=name if "/" in name else f"alice/{name}")

    def create_branch(self, *args, **kwargs):
        pass

    def list_repo_tree(self, repo_id, folder, **kwargs):
        if self.there is None:
            raise EntryNotFoundError("none")
        return [RepoFile(path=path, size=1, oid="o") for path in self.there]

    def create_commit(self, repo_id, operations, commit_message, revision):
        self.tries += 1
        error = self.answers.pop(0) if self.answers else None
        if error is not None:
            raise error
        kinds = defaultdict(list)
        for each in operations:
            kinds[type(each).__name__.removeprefix("CommitOperation")].append(each.path_in_repo)
        self.commits.append((commit_message, kinds, revision))
        return SimpleNamespace(oid=f"c{self.tries}", commit_url="u")


@pytest.fixture
def hub(monkeypatch):
    """Makes a `Hub` over an `Api`; `pauses` are the seconds that it has waited."""

    def make(*answers, there=None, **settings):
        made, api = Hub(name="m", folder=Path("x"), **{"wait_first": 3.0, **settings}), Api(answers, there)
        monkeypatch.setattr(Hub, "_api", lambda self: api)
        made.api, made.pauses = api, []
        monkeypatch.setattr(run_hub, "time", SimpleNamespace(sleep=made.pauses.append))
        return made

    return make


def push(**changes):
    return Push(**{"message": "m", "files": {"a": b"1"}, **changes})


def test_files_of_a_run_and_of_a_checkpoint(tmp_path):
    assert sorted(files_of_run(write(tmp_path / "run", OF_RUN + NOT_OF_RUN))) == sorted(OF_RUN)
    rollouts = write(tmp_path / "run", ["rollouts/step-000001.jsonl.gz"])
    found = files_of_run(rollouts)
    assert sorted(files_of_run(rollouts, rollouts=True)) == sorted([*found, "rollouts/step-000001.jsonl.gz"])
    assert found["model.safetensors"] == tmp_path / "run" / "model.safetensors"
    assert found["run.json"] == b"run.json", "it may change while it is uploaded"
    assert isinstance(found["runs/events.out.tfevents.1"], bytes)
    folder = write(tmp_path / "checkpoint-3", OF_MODEL + TO_RESUME)
    assert sorted(files_of_checkpoint(folder)) == sorted(OF_MODEL)
    place = files_of_checkpoint(folder, "last-checkpoint")
    assert sorted(place) == sorted(f"last-checkpoint/{name}" for name in OF_MODEL + TO_RESUME)


def test_what_may_pass_is_repeated_after_longer_and_longer_pauses(hub):
    made = hub(refusal(503), refusal(429), OSError("dropped"), retries=3)
    assert made.submit(push()).result(10).oid == "c4"
    assert made.pauses == [3.0, 6.0, 12.0]
    assert made.api.commits == [("m", {"Add": ["a"]}, None)]
    assert made.repo_id == "alice/m"


def test_it_is_given_up_aloud_after_the_retries_and_at_once_if_refused(hub, caplog):
    made = hub(*[refusal(500)] * 9, retries=2)
    assert made.submit(push()).result(10) is None
    assert (made.api.tries, made.pauses) == (3, [3.0, 6.0])
    assert "basis-rl push x alice/m" in caplog.text
    made = hub(refusal(403))
    assert made.submit(push()).result(10) is None
    assert (made.api.tries, made.pauses) == (1, [])
    made = hub(*[refusal(500)] * 9, retries=8, wait_first=100.0)
    made.submit(push()).result(10)
    assert max(made.pauses) == 300.0
    assert [is_refusal(refusal(status)) for status in (400, 404, 408, 409, 429, 500)] == [True, True, *[False] * 4]
    assert is_refusal(FileNotFoundError())
    assert not is_refusal(TimeoutError())


def test_a_checkpoint_replaces_the_one_before_in_the_same_commit(hub, tmp_path):
    made = hub(there=["last-checkpoint/old", "last-checkpoint/a"])
    files = {"last-checkpoint/a": b"1", "model": b"2"}
    made.submit(push(files=files, replaces="last-checkpoint", checkpoint=tmp_path / "checkpoint-4")).result(10)
    ((_, kinds, _),) = made.api.commits
    assert kinds == {"Add": ["last-checkpoint/a", "model"], "Delete": ["last-checkpoint/old"]}
    assert made.pushed == {"checkpoint-4"}
    made = hub()
    made.submit(push(replaces="last-checkpoint", revision="dev")).result(10)
    assert made.api.commits == [("m", {"Add": ["a"]}, "dev")], "there was none before"
    assert made.done()
    assert made.in_use() == []


def publisher(folder, made, strategy):
    hub = {"hub_strategy": strategy, "hub_always_push": False, "push_to_hub": True, "push_rollouts": False}
    settings = SimpleNamespace(output_dir=str(folder), **hub)
    result = object.__new__(Publisher)
    result.args, result.folder, result.hub = settings, Path(folder), made
    return result


class Recorder:
    """A hub that is busy or not, and keeps what it is told to push."""

    def __init__(self, free=True, pushed=()):
        self.free, self.pushed, self.pushes = free, set(pushed), []

    def done(self):
        return self.free

    def submit(self, push):
        self.pushes.append(push)
        return f"future of {push.message}"

    def in_use(self):
        return [push.checkpoint for push in self.pushes if push.checkpoint]


@pytest.mark.parametrize(
    ("strategy", "is_last", "free", "pushes", "place"),
    [
        (HubStrategy.END, False, True, 0, None),
        (HubStrategy.EVERY_SAVE, False, True, 1, None),
        (HubStrategy.EVERY_SAVE, False, False, 0, None),
        (HubStrategy.EVERY_SAVE, True, False, 1, None),
        (HubStrategy.CHECKPOINT, False, True, 1, "last-checkpoint"),
        (HubStrategy.ALL_CHECKPOINTS, False, False, 1, "checkpoint-2"),
    ],
)
def test_what_a_save_pushes_by_strategy(strategy, is_last, free, pushes, place, tmp_path):
    rollouts = ["rollouts/step-000001.jsonl.gz"]
    run = write(tmp_path / "run", OF_RUN + rollouts)
    folder = write(run / "checkpoint-2", OF_MODEL + TO_RESUME)
    made = Recorder(free)
    own = publisher(run, made, strategy)
    own.args.push_rollouts = free
    if own.is_due(is_last):
        own.push_checkpoint(folder, 2)
    assert len(made.pushes) == pushes
    for each in made.pushes:
        kept = {f"{place}/{name}" for name in OF_MODEL + TO_RESUME} if place else set()
        assert set(each.files) == {*OF_RUN, *OF_MODEL, *kept, *(rollouts if free else [])}
        assert (each.replaces, each.checkpoint) == (place, folder)
        assert each.files["config.json"] == folder / "config.json", "the checkpoint's, not that of an older save"


@pytest.mark.parametrize(
    ("strategy", "owed"),
    [
        (HubStrategy.EVERY_SAVE, []),
        (HubStrategy.CHECKPOINT, [("checkpoint-10", "last-checkpoint")]),
        (HubStrategy.ALL_CHECKPOINTS, [("checkpoint-2", "checkpoint-2"), ("checkpoint-10", "checkpoint-10")]),
    ],
)
def test_the_end_pushes_the_checkpoints_that_are_missing(strategy, owed, tmp_path):
    run = write(tmp_path / "run", OF_RUN)
    for name in ("checkpoint-2", "checkpoint-3", "checkpoint-10"):
        write(run / name, TO_RESUME)
    made = Recorder(pushed=["checkpoint-3"])
    assert publisher(run, made, strategy).push_run("End", "dev") == "future of End"
    first, *others = made.pushes
    assert set(first.files) == set(OF_RUN)
    assert [(push.checkpoint.name, push.replaces) for push in others] == owed
    assert {push.revision for push in made.pushes} == {"dev"}


@pytest.mark.parametrize(
    ("strategy", "owed"),
    [
        (HubStrategy.END, []),
        (HubStrategy.EVERY_SAVE, []),
        (HubStrategy.CHECKPOINT, ["checkpoint-10"]),
        (HubStrategy.ALL_CHECKPOINTS, ["checkpoint-2", "checkpoint-3", "checkpoint-10"]),
    ],
)
def test_a_resumed_run_pushes_what_a_kill_has_cut_off(strategy, owed, hub, tmp_path):
    run = tmp_path / "run"
    for name in ("checkpoint-2", "checkpoint-3", "checkpoint-10"):
        write(run / name, [*TO_RESUME, "manifest.json"])
    (write(run / "checkpoint-12", TO_RESUME) / "INCOMPLETE").touch()
    made = hub()
    publisher(run, made, strategy).catch_up()
    assert made.done(10.0)
    assert [message for message, _, _ in made.api.commits] == [f"Training resumed, {name}" for name in owed]


def test_the_command_renews_card_and_record_and_says_that_nothing_arrived(tmp_path, capsys):
    folder, results = tmp_path / "run", tmp_path / "results.json"
    folder.mkdir()
    save_run_info(replace(INFO, hub_model_id=None, finished=True), folder)
    results.write_text(json.dumps({"aime24": entry(0.6, 16)}))
    assert main(["push", str(folder), "bob/model"]) == 2
    assert "holds no model" in capsys.readouterr().err
    write(folder, ["model.safetensors"])
    save_run_info(replace(INFO, finished=False), folder)
    assert main(["push", str(folder), "bob/model"]) == 2, "the model is that of the end before the run went on"
    assert "an earlier end" in capsys.readouterr().err
    save_run_info(replace(INFO, hub_model_id=None, finished=True), folder)
    assert main(["push", str(folder), "bob/model", "--results", str(results), "--base_results", str(tmp_path)]) == 69
    assert "could not be pushed" in capsys.readouterr().err
    card = ModelCard.load(folder / "README.md")
    assert "# model" in card.text
    assert 'model="bob/model"' in card.text
    assert card.data.eval_results[0].metric_value == 0.6
    assert (folder / "base_results.json").is_file()
    facts = load_run_info(folder)
    assert (facts.hub_model_id, facts.model_name, facts.finished) == ("bob/model", "model", True)
    (tmp_path / "odd.json").write_text('{"aime24": {}}')
    before = (folder / "results.json").read_text()
    assert main(["push", str(folder), "--results", str(tmp_path / "odd.json")]) == 2
    assert "is not the results.json of an evaluation" in capsys.readouterr().err
    assert (folder / "results.json").read_text() == before
