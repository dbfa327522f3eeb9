"""Prompts that several rows ask are computed once, and generation goes on from them as if each row had its own."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import GenerationConfig

from basis_rl.engine.prefill import sharing
from tests.support.architectures import ARCHITECTURES, VOCABULARY, small_model

# Three prompts of 9, 12 and 5 tokens, asked by the rows in this order.
ASKED = [0, 1, 0, 2, 2, 1, 0, 2]
LENGTHS = (9, 12, 5)
# They remember more of a prompt than keys and values per token, could read images, or take no positions.
NOT_SHARED = (
    *("Qwen3-Next", "Qwen3.5", "MiniMax-01", "LFM2", "Jamba", "Granite 4", "Falcon-H1", "Nemotron-H", "Mamba", "RWKV"),
    *("Gemma3 (images)", "Qwen2.5-VL", "Qwen3-VL", "Gemma4", "Llama 4", "Bloom", "DeepSeek-V3.2"),
)


def batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        ids[row, -length:] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids[ASKED], "attention_mask": mask[ASKED]}


def generated(model, shared, **settings):
    """The tokens, and how many positions the model computed."""
    torch.manual_seed(1)
    config = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=2, **settings)
    seen = []
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    handle = plain.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    generate = sharing(model, model.generate) if shared else model.generate
    with torch.no_grad():
        tokens = generate(**batch(), generation_config=config)
    handle.remove()
    return tokens, sum(seen)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_the_tokens_are_those_of_generate(name):
    model = small_model(name, dtype=torch.float32).eval()
    expected, all_positions = generated(model, shared=False)
    tokens, positions = generated(model, shared=True)
    assert torch.equal(tokens, expected)
    saved = (len(ASKED) - len(LENGTHS)) * (max(LENGTHS) - 1)
    assert all_positions - positions == (0 if name in NOT_SHARED else saved)


def test_adapters_are_in_what_is_shared():
    model = get_peft_model(small_model("Llama", dtype=torch.float32), LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.eval()
    expected, all_positions = generated(model, shared=False)
    tokens, positions = generated(model, shared=True)
    assert torch.equal(tokens, expected)
    assert positions < all_positions
    with model.disable_adapter():
        assert not torch.equal(generated(model, shared=True)[0], expected)


LEARNT = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
OTHERS = [(None, {"num_beams": 2}), (None, {"use_cache": False}), (None, {"cache_implementation": "static"})]


@pytest.mark.parametrize(("prompts", "settings"), [*OTHERS, (LEARNT, {})])
def test_other_ways_to_generate_are_left_alone(prompts, settings):
    model = small_model("Llama", dtype=torch.float32)
    model = (get_peft_model(model, prompts) if prompts else model).eval()
    settings = {"disable_compile": True, **settings}
    expected, all_positions = generated(model, shared=False, **settings)
    tokens, positions = generated(model, shared=True, **settings)
    assert torch.equal(tokens, expected)
    assert positions == all_positions


def test_rows_that_differ_in_padding_only_are_different():
    model = small_model("Llama", dtype=torch.float32).eval()
    both = batch()
    rows = {key: value[:2].repeat_interleave(6, 0) for key, value in both.items()}
    rows["input_ids"][:] = rows["input_ids"][0]
    rows["attention_mask"][:6, :4] = 0
    config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        expected = model.generate(**rows, generation_config=config)
        tokens = sharing(model, model.generate)(**rows, generation_config=config)
    assert torch.equal(tokens, expected)
