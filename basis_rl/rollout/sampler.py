"""Sampling with transformers, in this process: for value tables and evaluations of models that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Completion(NamedTuple):
    """One sampled completion: its text without special tokens, and its token ids up to the end token, included."""

    text: str
    token_ids: list[int]


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    num_samples: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    batch_size: int = 256,
) -> Iterator[tuple[int, list[Completion]]]:
    """Completions of each prompt, as they are ready: ``(index of the prompt, its num_samples completions)``.

    Args:
        model: in any mode; it is put into evaluation mode.
        tokenizer: with a pad token; prompts are padded on the left.
        prompts: rendered text, special tokens included.
        num_samples: completions of each prompt.
        max_new_tokens: where a completion is cut.
        temperature: 0 is greedy.
        top_p: nucleus, 1 is everything.
        top_k: 0 is everything.
        batch_size: sequences generated at a time (at least one prompt with all its samples).
    """
    model.eval()
    generator: Any = model  # transformers types `generate` as a property of a mixin
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    if temperature > 0:
        options |= {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    else:
        options |= {"do_sample": False}
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])}
    options["eos_token_id"] = [token for token in ends if token is not None]
    # Prompts of similar length together: less padding. The order of the results is the caller's business.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    at_a_time = max(1, batch_size // num_samples)
    for start in range(0, len(order), at_a_time):
        chunk = order[start : start + at_a_time]
        texts = [prompts[i] for i in chunk for _ in range(num_samples)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        inputs = inputs.to(model.device)
        output = generator.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
        ids = [_until_end(row, ends) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        completions = [Completion(text, row) for text, row in zip(texts, ids, strict=True)]
        for k, index in enumerate(chunk):
            yield index, completions[k * num_samples : (k + 1) * num_samples]


def _until_end(token_ids: list[int], ends: set[int | None]) -> list[int]:
    for position, token in enumerate(token_ids):
        if token in ends:
            return token_ids[: position + 1]
    return token_ids
