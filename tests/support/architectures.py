"""Small models of many architectures with random weights and the defaults of their configurations but for sizes, whose
scores depend on everything that attention may have."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.tiny import DEVICE

VOCABULARY = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "num_hidden_layers": 1,
    "num_attention_heads": 2, "out_hidden_size": 32, "image_size": 28, "patch_size": 14,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
COMPRESSED = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_d_state": 8}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
WINDOW = {"sliding_window": 5}
# For GPT-2, whose default is 0.1.
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BOTH = ["sliding_attention", "full_attention"]
EAGER = {"attn_implementation": "eager"}

# By name: the model's type, and what its configuration has beyond or instead of `SHAPE`. What a configuration does not
# know is left out, and so is what is None here.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", WINDOW),
    "Qwen2": ("qwen2", {**WINDOW, "use_sliding_window": True, "layer_types": BOTH}),
    "Qwen3": ("qwen3", {}),
    "SmolLM3": ("smollm3", {}),
    "Gemma2": ("gemma2", {**WINDOW, **EAGER, "layer_types": BOTH}),
    "Gemma3": ("gemma3_text", {**WINDOW, "layer_types": BOTH}),
    "Phi3": ("phi3", WINDOW),
    "OLMo3": ("olmo3", {**WINDOW, "layer_types": BOTH}),
    "Cohere2": ("cohere2", {**WINDOW, "layer_types": BOTH}),
    "GLM4": ("glm4", {}),
    "Granite": ("granite", {"attention_multiplier": 0.3, "logits_scaling": 4.0}),
    "Seed-OSS": ("seed_oss", {}),
    "GPT-NeoX": ("gpt_neox", {}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "GPT-2": ("gpt2", {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "GPT-OSS": ("gpt_oss", {**EXPERTS, **WINDOW, **EAGER, "layer_types": BOTH}),
    "Mixtral": ("mixtral", EXPERTS),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS),
    # Its layers have a window that they do not tell their attention function.
    "Qwen2-MoE": ("qwen2_moe", {**EXPERTS, **WINDOW, "use_sliding_window": True, "layer_types": BOTH}),
    "OLMoE": ("olmoe", EXPERTS),
    "GLM-4.5": ("glm4_moe", EXPERTS),
    "DeepSeek-V3": ("deepseek_v3", {**EXPERTS, **COMPRESSED, "num_key_value_heads": 4}),
    "MiniMax-M2": ("minimax_m2", EXPERTS),
    "PhiMoE": ("phimoe", EXPERTS),
    "Qwen3-Next": ("qwen3_next", {**EXPERTS, **DELTA}),
    "Qwen3.5": ("qwen3_5", DELTA),
    "MiniMax-01": ("minimax", {**EXPERTS, "layer_types": ["linear_attention", "full_attention"]}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "Jamba": ("jamba", {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "Granite 4": ("granitemoehybrid", {**EXPERTS, **MAMBA2, "layer_types": ["mamba", "attention"]}),
    "Falcon-H1": ("falcon_h1", MAMBA2),
    "Nemotron-H": (
        "nemotron_h",
        {**EXPERTS, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    ),
    "Gemma3 (images)": ("gemma3", {**WINDOW, "layer_types": BOTH}),
    "Qwen2.5-VL": ("qwen2_5_vl", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}),
    "Qwen3-VL": ("qwen3_vl", {}),
    "Gemma4": (
        "gemma4",
        {**WINDOW, "layer_types": BOTH, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    ),
    "Llama 4": ("llama4", {**EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 64}),
    "Mamba": ("mamba", {**EAGER, "state_size": 8}),
    "Bloom": ("bloom", {**EAGER, "n_layer": 2, "n_head": 4}),
    "DeepSeek-V3.2": (
        "deepseek_v32",
        {**EXPERTS, **COMPRESSED, "num_key_value_heads": 4, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8},
    ),
    "RWKV": ("rwkv", {**EAGER, "attention_hidden_size": 32}),
    "ModernBERT (decoder)": ("modernbert-decoder", {}),
}  # fmt: skip


def small_model(name: str, attention: str | None = None, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The model of that architecture, with the attention implementation of the table or that one, in training mode."""
    kind, own = ARCHITECTURES[name]
    wanted = {key: value for key, value in (SHAPE | own | changes).items() if value is not None}
    implementation = attention or wanted.pop("attn_implementation", "sdpa")
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    images = hasattr(default, "vision_config")

    def known(owner: Any, settings: dict[str, Any]) -> dict[str, Any]:
        names = {*owner.__dataclass_fields__, *owner.attribute_map}
        return {key: value for key, value in settings.items() if key in names}

    if images:
        seen = type(default.vision_config)
        vision = known(seen, IMAGES) if hasattr(seen, "__dataclass_fields__") else None
        config = config_class(text_config=known(type(default.text_config), wanted), vision_config=vision)
    else:
        config = config_class(**known(config_class, wanted))
    torch.manual_seed(0)
    builder = AutoModelForImageTextToText if images else AutoModelForCausalLM
    # Faster kernels for experts have no float64.
    model = builder.from_config(config, attn_implementation=implementation, experts_implementation="eager").to(dtype)
    # Random weights of the usual size give attention that is all but uniform.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.to(DEVICE).train()
