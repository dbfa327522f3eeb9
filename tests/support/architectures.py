"""Small models of many architectures with random weights, whose scores depend on everything that attention may have."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.support.tiny import DEVICE

VOCABULARY = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
WITHOUT_AUXILIARY = {**EXPERTS, "router_aux_loss_coef": 0.0}
WINDOW = {"sliding_window": 5}
BOTH = ["sliding_attention", "full_attention"]
WITHOUT_GROUPS = ("num_key_value_heads", "head_dim")

# By name: the model class, and what its configuration has beyond or instead of `SHAPE` (None: does not take it).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mistral": ("Mistral", WINDOW),
    "Qwen2": ("Qwen2", {**WINDOW, "use_sliding_window": True, "layer_types": BOTH, "head_dim": None}),
    "Qwen3": ("Qwen3", {}),
    "SmolLM3": ("SmolLM3", {}),
    "Gemma2": ("Gemma2", {**WINDOW, "layer_types": BOTH, "attn_implementation": "eager"}),
    "Gemma3": ("Gemma3", {**WINDOW, "layer_types": BOTH}),
    "Phi3": ("Phi3", {**WINDOW, "head_dim": None}),
    "Olmo2": ("Olmo2", {"head_dim": None}),
    "Cohere": ("Cohere", {"head_dim": None}),
    "Granite": ("Granite", {"head_dim": None, "attention_multiplier": 0.3, "logits_scaling": 4.0}),
    "GPT-NeoX": ("GPTNeoX", dict.fromkeys(WITHOUT_GROUPS)),
    "OPT": (
        "OPT",
        {**dict.fromkeys(WITHOUT_GROUPS), "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "GPT-2": (
        "GPT2",
        {
            **dict.fromkeys((*WITHOUT_GROUPS, "intermediate_size")),
            "n_positions": 128,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "GPT-2 with dropout": ("GPT2", {**dict.fromkeys((*WITHOUT_GROUPS, "intermediate_size")), "n_positions": 128}),
    "GPT-OSS": ("GptOss", {**WINDOW, **WITHOUT_AUXILIARY, "layer_types": BOTH, "attn_implementation": "eager"}),
    "Mixtral": ("Mixtral", WITHOUT_AUXILIARY),
    "Mixtral (auxiliary loss)": ("Mixtral", EXPERTS),
    "Qwen3-MoE": ("Qwen3Moe", {**WITHOUT_AUXILIARY, "num_local_experts": 4, "moe_intermediate_size": 24}),
    # Its layers have a window that they do not tell their attention function.
    "Qwen2-MoE": (
        "Qwen2Moe",
        {
            **WITHOUT_AUXILIARY,
            **WINDOW,
            "head_dim": None,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "layer_types": BOTH,
        },
    ),
    "LFM2 (convolutions)": ("Lfm2", {"head_dim": None, "layer_types": ["conv", "full_attention"]}),
    "Jamba (state space)": (
        "Jamba",
        {
            **WITHOUT_AUXILIARY,
            "head_dim": None,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "Bloom (ALiBi)": (
        "Bloom",
        {
            **dict.fromkeys((*WITHOUT_GROUPS, "intermediate_size", "max_position_embeddings")),
            "attn_implementation": "eager",
        },
    ),
}


def small_model(name: str, attention: str | None = None, dtype: torch.dtype = torch.float64) -> Any:
    """The model of that architecture, with the attention implementation of the table or that one, in training mode."""
    kind, changes = ARCHITECTURES[name]
    settings = {key: value for key, value in (SHAPE | changes).items() if value is not None}
    settings["attn_implementation"] = attention or settings.get("attn_implementation", "sdpa")
    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")
    model = model_class(config_class(**settings)).to(dtype)
    # Random weights of the usual size give attention that is all but uniform.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.to(DEVICE).train()
