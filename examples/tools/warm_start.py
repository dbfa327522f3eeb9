"""A small model that has seen solutions with and without a calculator.

It can copy an expression into a call and a result into a box, but it cannot multiply. Reinforcement learning decides
whether it calls the calculator.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from basis_rl.tools import calculator
from examples.quickstart.warm_start import START, build_tokenizer

# As Qwen's, but without the long description of the tools in the prompt: the model has seen its only tool in use.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{% set call = call['function'] or call %}"
    '<tool_call>{"name": "{{ call[\'name\'] }}", "arguments": {{ call[\'arguments\'] | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# How calls are read back (transformers: chat response parsing).
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": f"{START}assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def tool_tokenizer(questions: Iterable[str], vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """The quickstart's tokenizer with a chat template for tools; text that all calls share becomes few tokens."""
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "7*8"}}</tool_call>'
    texts = [text for q in questions for text in (q, call, "\\boxed{7}", "assistant\n", "user\n", "tool\n")]
    tokenizer = build_tokenizer(texts, vocab_size)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def conversation(row: dict[str, Any], *, use_tool: bool) -> list[dict[str, Any]]:
    """The problem, solved with or without the calculator."""
    answer = {"role": "assistant", "content": f"\\boxed{{{row['solution']}}}"}
    if not use_tool:
        return [*row["prompt"], answer]
    a, b = re.findall(r"\d+", row["prompt"][-1]["content"])
    expression = f"{a}*{b}"
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
    return [
        *row["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": calculator(expression)},
        answer,
    ]


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and labels, which cover only the assistant's turns."""
    ids: list[int] = []
    labels: list[int] = []
    for i, message in enumerate(messages):
        own = message["role"] == "assistant"
        text = str(tokenizer.apply_chat_template([message], tokenize=False))
        head = f"{START}assistant\n" if own else ""
        for part, learnt in ((head, False), (text.removeprefix(head).removesuffix("\n"), own), ("\n", False)):
            if part == "\n" and i == len(messages) - 1:
                continue
            tokens = tokenizer(part)["input_ids"]
            ids += tokens
            labels += tokens if learnt else [-100] * len(tokens)
    return ids, labels


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    dataset: Dataset,
    *,
    tool_share: float = 0.5,
    steps: int = 400,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> None:
    """Train supervised on conversations, of which the share `tool_share` uses the calculator."""
    generator = random.Random(seed)
    texts = [encode(tokenizer, conversation(row, use_tool=generator.random() < tool_share)) for row in dataset]
    fit(model, tokenizer, texts, steps=steps, batch_size=batch_size, learning_rate=learning_rate)


def fit(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[tuple[list[int], list[int]]],
    *,
    steps: int = 400,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
) -> None:
    """Train supervised on conversations as `encode` gives them."""
    width = max(len(ids) for ids, _ in texts)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in texts])
    labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    progress = tqdm(range(steps), desc="warm start", unit="step", mininterval=5)
    for step in progress:
        rows = torch.randint(len(ids), (batch_size,))
        output = model(input_ids=ids[rows], attention_mask=(ids[rows] != pad).long(), labels=labels[rows])
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{output.loss.item():.3f}")
