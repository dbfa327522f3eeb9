"""Weights with an adapter merged, as an engine gets them: what they are, and that the model's own stay to the bit."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from basis_rl.engine.weights import merged_parameters
from basis_rl.run.errors import RequestRefused
from tests.support.served import save_model

ALL = {"target_modules": "all-linear"}
KINDS = {
    "all layers": ALL,
    "DoRA": {**ALL, "use_dora": True},
    "patterns": {**ALL, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"o_proj": 3}, "use_rslora": True},
    "trained biases": {**ALL, "bias": "all"},
    "a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embeddings and head": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {tied: save_model(tmp_path_factory.mktemp("model") / "model", tied=tied) for tied in (True, False)}


def policy(base, lora):
    """With an adapter of random numbers, and another one that is not in use."""
    torch.manual_seed(1)
    made = get_peft_model(base, LoraConfig(r=4, lora_alpha=32, **lora))
    # PEFT has these for one adapter only.
    if not {"trainable_token_indices", "bias"} & set(lora):
        made.add_adapter("ref", LoraConfig(r=4, lora_alpha=32, **lora))
    step(made)
    return made


def step(model):
    """As an optimizer: every trained parameter moves."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)


def frozen(model):
    return {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}


def pushed(model):
    return dict(merged_parameters(model, lambda parameters: nullcontext(), torch.device("cpu")))


def assert_untouched(model, before):
    after = frozen(model)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not any(layer.merged for layer in model.modules() if isinstance(layer, BaseTunerLayer))


def test_the_base_model_is_the_same_to_the_bit_after_20_pushes(models):
    model = policy(AutoModelForCausalLM.from_pretrained(models[True], dtype="bfloat16"), ALL)
    before = frozen(model)
    for _ in range(20):
        step(model)
        sent = pushed(model)
    assert_untouched(model, before)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    expected = (layer.weight.float() + layer.get_delta_weight("default").float()).bfloat16()
    assert torch.equal(sent["model.layers.0.self_attn.q_proj.weight"], expected), "rounded once"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_pushed_is_what_peft_merges_once(kind, tied, dtype, models):
    base = AutoModelForCausalLM.from_pretrained(models[tied], dtype=dtype)
    names = {name for name, _ in base.named_parameters()}
    model = policy(base, KINDS[kind])
    before = frozen(model)
    sent = pushed(model)
    assert_untouched(model, before)
    twin = copy.deepcopy(model)
    tied_head = tied and kind == "embeddings and head"
    expected = dict(twin.merge_and_unload().named_parameters())
    # A trained copy of a tied head is no longer tied.
    assert set(sent) == names | ({"lm_head.weight"} if kind == "a trained head" else set())
    for name, value in sent.items():
        if tied_head and name == "model.embed_tokens.weight":
            # PEFT unties what it unloads; while it is tied, both changes belong to the one weight.
            continue
        assert value.dtype == getattr(torch, dtype)
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "trained tokens"])
def test_names_and_values_are_those_of_trl(kind, models):
    """Which does not know trained tokens; its own unmerging comes last here."""
    model = policy(AutoModelForCausalLM.from_pretrained(models[True], dtype="float32"), KINDS[kind])
    sent = pushed(model)
    engine = object.__new__(VLLMGeneration)
    engine.model = model
    engine._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext())
    trls = {name: each.clone() for name, each in engine._iter_named_params() if ".modules_to_save.ref." not in name}
    assert list(sent) == list(trls)
    assert all(torch.equal(sent[name], value) for name, value in trls.items())


def test_layers_that_merge_into_new_parameters_are_refused(models, monkeypatch):
    """As those of bitsandbytes, which needs a GPU."""
    merge = Linear.merge

    def merge_anew(layer):
        merge(layer)
        base = layer.get_base_layer()
        base.weight = torch.nn.Parameter(base.weight.data.clone(), requires_grad=False)

    monkeypatch.setattr(Linear, "merge", merge_anew)
    with pytest.raises(RequestRefused, match=r"q_proj.* Set vllm_lora_sync: adapter"):
        pushed(policy(AutoModelForCausalLM.from_pretrained(models[False]), ALL))


def test_a_push_that_ends_halfway_leaves_nothing_merged(models):
    model = policy(AutoModelForCausalLM.from_pretrained(models[False], dtype="bfloat16"), ALL)
    before = frozen(model)
    parameters = merged_parameters(model, lambda parameters: nullcontext(), torch.device("cpu"))
    kept = [next(parameters) for _ in range(9)]
    assert_untouched(model, before)
    whole = pushed(model)
    assert all(torch.equal(value, whole[name]) for name, value in kept), "they stay what they were"
