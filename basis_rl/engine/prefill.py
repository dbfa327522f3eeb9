"""Generation with transformers in which a prompt is computed once, however many rows of the batch ask it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from basis_rl.functional.packing import LEAST_SAVED

# Arguments of `generate` for texts. Any other, such as images, belongs to single rows, which cannot be merged then.
TEXT = {"input_ids", "attention_mask", "generation_config", "stopping_criteria", "tokenizer"}
LAYER_TYPES = {"full_attention", "sliding_attention"}


def sharing(model: Any, generate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`generate`, the method of a transformers or PEFT model, as a function that computes equal prompts once.

    The keys and values of the ``U`` different prompts among ``(B, P)``, without their last token, are copied to the
    ``B`` rows, and generation continues from there. Rows are padded on the left. `generate` is called unchanged where
    the model has layers other than attention or keeps no such cache, or where too little would be saved. The tokens are
    those of `generate` up to rounding.
    """

    def generated(**given: Any) -> Tensor:
        config = given.get("generation_config") or model.generation_config
        if set(given) - TEXT or not _keeps_prompts(model) or not _has_plain_cache(config):
            return generate(**given)
        ids = given["input_ids"]
        rows = torch.stack([ids, given["attention_mask"]], dim=-1)
        different, index = rows.unique(dim=0, return_inverse=True)
        if (len(rows) - len(different)) * (ids.shape[1] - 1) < LEAST_SAVED:
            return generate(**given)
        return generate(**given, past_key_values=_prefilled(model, different[:, :-1], index))

    return generated


@torch.no_grad()
def _prefilled(model: Any, prompts: Tensor, index: Tensor) -> DynamicCache:
    """Keys and values of prompts ``(U, P, 2)`` (ids and mask), copied to the rows that `index` ``(B,)`` names."""
    ids, mask = prompts.unbind(-1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    # Nobody reads the logits of this pass; 1 computes as few as possible.
    model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    cache.batch_select_indices(index)
    return cache


def _keeps_prompts(model: Any) -> bool:
    """Whether keys and values per token are all that a model remembers of a prompt."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    learnt = any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values())
    text = plain.config.get_text_config()
    takes: Mapping[str, Any] = inspect.signature(type(plain).forward).parameters
    return (
        not learnt
        and text is plain.config
        and not plain.config.is_encoder_decoder
        and not plain._is_stateful
        and set(getattr(text, "layer_types", None) or ()) <= LAYER_TYPES
        and {"past_key_values", "position_ids", "logits_to_keep"} <= set(takes)
    )


def _has_plain_cache(config: Any) -> bool:
    return config.use_cache is not False and config.cache_implementation is None and (config.num_beams or 1) == 1
