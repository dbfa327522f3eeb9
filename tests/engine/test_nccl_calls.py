"""Weights over NCCL, which no machine here has: what is announced to the server is what the communicator is given."""

import inspect
from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from trl.generation import vllm_client

from tests.engine.test_requests import bare, training_client
from tests.support.tiny import DEVICE, tiny_model

GROUP = object()


class Communicator:
    """In place of vLLM's: takes the tensors while the server's request for them is under way, and keeps copies."""

    def __init__(self, server):
        self.server = server
        self.received = []

    def take(self, named):
        assert self.server.announced.wait(10.0), "the server is told before anything is sent"
        taken = []
        for name, tensor in named:
            assert tensor.device.type == DEVICE
            assert tensor.is_contiguous(), "its bytes are sent as they lie"
            taken.append((name, tensor.clone()))
        self.received.append(taken)
        self.server.sent.set()

    def packed_producer(self, iterator, group, src, post_iter_func):
        assert (group, src) == (GROUP, 0)
        items = list(iterator)
        assert all(post_iter_func(item) is item[1] for item in items)
        self.take(items)


class Server:
    """Answers as vLLM does: the request that announces weights ends when they have been sent."""

    def __init__(self):
        self.announced = Event()
        self.sent = Event()
        self.asked = []

    def ask(self, path, body=None):
        self.asked.append((path, body))
        if path == "/update_weights":
            self.announced.set()
            assert self.sent.wait(10.0), "the server would wait forever"
            self.announced.clear()
            self.sent.clear()
        return {}


def generation_with(model, server, monkeypatch):
    client = training_client(server.ask)
    client.settings.transfer = "nccl"
    session = SimpleNamespace(interrupting=nullcontext)
    vars(client).update(version=0, session=session, communicator=GROUP, _updating_weights=False, run="r", owner={})
    monkeypatch.setattr(client, "reset_prefix_cache", lambda: None)
    monkeypatch.setattr(client, "prompt_log_probs", lambda ids: torch.zeros(len(ids) - 1))
    dist = SimpleNamespace(gather_params=lambda parameters: nullcontext(), is_fsdp=False)
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1, device=torch.device(DEVICE))
    made = bare(accelerator, client, settings=client.settings, _weight_metadata=None, _dist=dist, probe=[1, 2, 3])
    vars(made).update(model=model, by_main=lambda task: task(), _check=lambda served: None)
    return made


@pytest.mark.parametrize("lora", [False, True])
def test_what_is_announced_is_what_is_sent_at_every_push(lora, monkeypatch):
    """With the names, types and shapes of the policy, also where an adapter is merged into it for the push."""
    server = Server()
    communicator = Communicator(server)
    plain = tiny_model().to(DEVICE)
    shapes = {name: (str(p.dtype).removeprefix("torch."), list(p.shape)) for name, p in plain.named_parameters()}
    model = plain
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    # The engine of vLLM 0.28 and newer.
    monkeypatch.setattr(vllm_client, "_HAS_STATEFUL_TRAINER_ENGINE", True, raising=False)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", communicator.packed_producer, raising=False)
    made = generation_with(model, server, monkeypatch)
    made._push()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    made._push()
    assert [path for path, _ in server.asked] == [
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ] * 2
    told = [body["update_info"] for path, body in server.asked if path == "/update_weights"]
    assert len(told) == len(communicator.received) == 2
    for info, received in zip(told, communicator.received, strict=True):
        found = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in received]
        assert list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True)) == found
        assert {name: (dtype, shape) for name, dtype, shape in found} == shapes
    assert all(not torch.equal(a, b) for (_, a), (_, b) in zip(*communicator.received, strict=True))


def test_the_reference_has_vllms_parameters():
    """Of the vLLM that is installed, if one is."""
    packed = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor").packed_nccl_broadcast_producer
    given = {"iterator", "group", "src", "post_iter_func"}
    assert given <= set(inspect.signature(packed).parameters)
