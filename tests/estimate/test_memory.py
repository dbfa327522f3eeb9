"""The arithmetic of memory against what torch allocates."""

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config
from trl import ModelConfig
from trl.trainer.utils import add_fused_lm_head

from basis_rl.estimate import memory
from basis_rl.estimate.footprint import model_size
from basis_rl.estimate.memory import (
    ModelSize,
    Part,
    Setting,
    backward_parts,
    generation_parts,
    head_bytes,
    memory_parts,
    peak,
    static_parts,
)
from basis_rl.trainer import head
from basis_rl.trainer.head import compact_head
from basis_rl.trainer.packing import Scorer, enable_packing
from benchmarks.common import peak_bytes
from tests.support.tiny import config

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
CONFIGS = {"qwen2": Qwen2Config(**SHAPE), "qwen3": Qwen3Config(**SHAPE, head_dim=16)}
ROWS, PROMPT, COMPLETION = 4, 16, 112


def named(parts):
    return {part.name: part.bytes for part in parts}


def size_of(name):
    return model_size(CONFIGS[name], ModelConfig(model_name_or_path=name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_gradients_and_moments_are_exact(name, dtype):
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    parameters = list(model.parameters())
    states = [x for state in optimizer.state.values() for x in state.values()]
    setting = Setting(frozen_bytes=dtype.itemsize, trainable_bytes=dtype.itemsize)
    assert named(static_parts(size_of(name), setting)) == {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters),
        "optimizer: moments": sum(x.nbytes for x in states),
    }


def saved_bytes(call, model, context, *, padded=False, one_prompt=False):
    """Bytes of all storages that autograd keeps for the backward pass, parameters aside, each once."""
    ids = torch.randint(0, 512, (ROWS, PROMPT + COMPLETION))
    if one_prompt:
        ids[:, :PROMPT] = ids[0, :PROMPT]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0 if padded else 1
    labels = ids.masked_fill(torch.arange(PROMPT + COMPLETION) < PROMPT, -100)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, or its address is given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        call(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return sum(size for size, _ in kept.values())


PRECISIONS = ("float32", "bfloat16", "autocast")
CASES = [(*case, False) for case in itertools.product(CONFIGS, PRECISIONS, ("sdpa",), (False, True))]
CASES += [("qwen3", precision, "eager", True, False) for precision in PRECISIONS]
CASES += [("qwen3", "float32", "sdpa", False, True)]


@pytest.mark.parametrize(("name", "precision", "attention", "padded", "checkpointing"), CASES)
def test_activations_are_what_autograd_keeps(name, precision, attention, padded, checkpointing):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype, attn_implementation=attention).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    low = 2 if precision == "autocast" else 0
    setting = Setting(
        low=low,
        frozen_bytes=dtype.itemsize,
        trainable_bytes=dtype.itemsize,
        rows=ROWS,
        prompt=PROMPT,
        completion=COMPLETION,
        checkpointing=checkpointing,
        attention=attention if padded else "flash_attention_2",
    )
    size = size_of(name)
    parts = named(backward_parts(size, setting))
    estimate = parts["activations kept"] + parts.get("autocast's copies of the weights", 0.0)
    estimate += setting.residual * ROWS * COMPLETION * size.hidden  # the head's input, counted with the head
    context = torch.autocast("cpu", torch.bfloat16, enabled=low > 0)
    assert estimate == pytest.approx(saved_bytes(model, model, context, padded=padded), rel=0.05)


PACKED = [(attention, scoring, False) for attention in ("sdpa", "eager") for scoring in ("packed", "shared")]


@pytest.mark.parametrize(("attention", "scoring", "checkpointing"), [*PACKED, ("sdpa", "packed", True)])
def test_activations_of_packed_rows_are_at_most_what_is_estimated(attention, scoring, checkpointing, monkeypatch):
    """Exact where nothing is shared; where prompts are, the estimate has every prompt once for each row."""
    # Segments of a real length go through attention one by one.
    monkeypatch.setattr("basis_rl.trainer.attention.SHORT", 0, raising=False)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"], attn_implementation=attention).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    setting = Setting(
        rows=ROWS, prompt=PROMPT, completion=COMPLETION, checkpointing=checkpointing, attention=attention,
        scoring=scoring, cpu=True, compact_head=True,
    )  # fmt: skip
    estimate = named(backward_parts(size_of("qwen3"), setting))["activations kept"]
    estimate += 4 * ROWS * COMPLETION * SHAPE["hidden_size"]
    scorer = Scorer(model, enable_packing(model, config("unused")))
    measured = saved_bytes(scorer, model, contextlib.nullcontext(), one_prompt=scoring == "shared")
    assert measured <= 1.05 * estimate
    assert measured >= (0.95 if scoring == "packed" else 0.8) * estimate


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("compact", [True, False])
def test_the_head_on_a_cpu_holds_what_is_estimated(compact, precision, monkeypatch):
    """Its tile is made small, as a vocabulary and thousands of tokens would make it."""
    monkeypatch.setattr(head, "TILE_BYTES", 2**20)
    monkeypatch.setattr(memory, "TILE_BYTES", 2**20)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    vocabulary, hidden, prompt, completion = 4096, 32, 64, 448
    shape = Qwen2Config(**{**SHAPE, "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    states = torch.randn(1, prompt + completion, hidden, dtype=dtype)
    labels = torch.randint(0, vocabulary, states.shape[:2])
    labels[:, :prompt] = -100
    model.model.forward = lambda **_: SimpleNamespace(last_hidden_state=states.clone().requires_grad_())
    low = 2 if precision == "autocast" else 0
    setting = Setting(
        low=low, frozen_bytes=dtype.itemsize, trainable_bytes=dtype.itemsize, prompt=prompt, completion=completion,
        cpu=True, compact_head=compact,
    )  # fmt: skip

    def work():
        ours = compact_head(torch.device("cpu")) if compact else contextlib.nullcontext()
        with torch.autocast("cpu", torch.bfloat16, enabled=low > 0), ours:
            output = model(input_ids=labels, shift_labels=labels, fused_lm_head=True)
        (output.log_probs.sum() + 0.1 * output.entropy.sum()).backward()

    size = model_size(shape, ModelConfig(model_name_or_path="m"))
    assert head_bytes(size, setting) == pytest.approx(peak_bytes(work), rel=0.15)


SIZE = ModelSize(
    parameters=1000,
    trainable=1000,
    trainable_tensors=10,
    layer_matrices=900,
    layers=3,
    hidden=8,
    intermediate=24,
    query=8,
    key_value=4,
    heads=2,
    vocabulary=50,
    qk_norm=False,
)


@pytest.mark.parametrize("compact", [True, False])
def test_beside_its_tile_a_head_holds_gradients_of_its_matrix_and_of_hidden_states(compact):
    size = dataclasses.replace(SIZE, vocabulary=50_000)
    matrix = size.vocabulary * size.hidden

    def held(tokens=10_000, size=size, **settings):
        return head_bytes(size, Setting(completion=tokens, compact_head=compact, **settings))

    # So many tokens fill more than one tile.
    assert held(10_003) - held() == 3 * (4 + 4) * size.hidden
    low = {"frozen_bytes": 2, "trainable_bytes": 2}
    assert held(10_003, **low) - held(**low) == 3 * (4 + 2) * size.hidden
    assert held() - held(size=dataclasses.replace(size, trainable=100)) == 4 * matrix
    assert held(engine="deepspeed", stage=3) - held(engine="deepspeed", stage=2) == 4 * matrix
    assert held(engine="fsdp") - held() == 4 * matrix


def test_sharding_divides_what_it_says_and_adapters_alone_have_gradients():
    def held(**settings):
        return named(static_parts(SIZE, Setting(**settings)))

    zero3 = {w: held(engine="deepspeed", stage=3, world=w, low=2) for w in (1, 4)}
    assert {name: 4 * value for name, value in zero3[4].items()} == zero3[1]
    assert sum(zero3[1].values()) == (2 + 2 + 4 + 8) * 1000  # ZeRO's 16 bytes a parameter
    zero2 = held(engine="deepspeed", stage=2, world=4, low=2)
    assert zero2 == {**zero3[4], "weights": 2000}
    assert held(engine="deepspeed", stage=1, world=4, low=2) == {**zero2, "gradients": 2000}
    assert "weights" not in held(engine="deepspeed", stage=3, world=4, low=2, offload_parameters=True)
    assert held(engine="deepspeed", stage=3, world=4, low=2, offload_optimizer=True) == {"weights": 500}
    assert held(engine="deepspeed", stage=1, world=4, low=2, offload_optimizer=True)["gradients"] == 2000
    fsdp = held(engine="fsdp", world=4, low=2, frozen_bytes=2, trainable_bytes=2)
    assert fsdp == {"weights": 1000, "gradients": 1000, "optimizer: moments": 2000 + 40}
    assert held(engine="fsdp", world=4, low=2, accumulation=2)["gradients: accumulated, not sharded"] == 2000
    assert held(world=2)["gradients: DDP's buckets"] == held(world=1)["gradients"] == 4000
    assert held(reference=True)["reference model"] == 4000
    lora = dataclasses.replace(SIZE, parameters=1100, trainable=100)
    found = named(static_parts(lora, Setting(frozen_bytes=2, trainable_bytes=4)))
    assert found == {"weights": 2 * 1000 + 4 * 100, "gradients": 400, "optimizer: moments": 800 + 40}


def test_the_cache_grows_with_sequences_and_their_length():
    def cache(**settings):
        return named(generation_parts(SIZE, Setting(prompt=10, completion=30, **settings))).get("KV cache", 0)

    assert cache(generated=0) == 0
    assert cache(generated=5) == 5 * 40 * 3 * (4 + 4) * 4  # sequences x length x layers x (keys + values) x bytes
    assert cache(generated=5, engine="deepspeed", stage=2, low=2) == cache(generated=5) / 2


def test_phases_are_not_there_at_the_same_time():
    parts = [Part("a", 10.0), Part("b", 3.0, "backward"), Part("c", 4.0, "backward"), Part("d", 6.0, "generation")]
    assert peak(parts) == 17.0
    setting = Setting(rows=2, prompt=8, completion=8, generated=4)
    assert peak(memory_parts(SIZE, setting)) >= sum(part.bytes for part in static_parts(SIZE, setting))
