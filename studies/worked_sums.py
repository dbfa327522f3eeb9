"""A small policy that works before it answers: it adds in steps that it chooses itself.

It splits ``b`` of ``a + b`` into parts of its own choice, ``37 + 45: +5=42 +40=82 \\boxed{82}``, and can make a mistake
in any of the steps. Most of the tokens that it samples decide nothing, as in long reasoning.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM, set_seed

from basis_rl.engine import Sampling, prompt_tokens, sample
from examples.quickstart.warm_start import END, build_model, build_tokenizer
from studies.small_policy import SUM
from studies.training import started

TOKENS = 40  # of a rollout, at most


def worked(problem: str, random: Random) -> str:
    """A demonstration: tens and units of ``b``, each in one or two parts, in any order; then the boxed result."""
    found = SUM.search(problem)
    assert found is not None, problem
    total, sign, b = int(found[1]), found[2], int(found[3])
    parts = []
    for digit, unit in ((b // 10, 10), (b % 10, 1)):
        cut = random.randint(0, digit // 2)
        parts += [unit * part for part in (cut, digit - cut) if part]
    random.shuffle(parts)
    steps = []
    for part in parts:
        total += part if sign == "+" else -part
        steps.append(f"{sign}{part}={total} ")
    return f"{''.join(steps)}\\boxed{{{total}}}"


def encode(tokenizer: PreTrainedTokenizerFast, dataset: Dataset, random: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, ``(P, S)``, of a demonstration of each problem; padded on the right, with prompts masked."""
    ids, labels = [], []
    for prompt in dataset["prompt"]:
        head = prompt_tokens(prompt, tokenizer, {})
        tail = tokenizer(worked(prompt[-1]["content"], random) + END)["input_ids"]
        ids.append(torch.tensor([*head, *tail]))
        labels.append(torch.tensor([*[-100] * len(head), *tail]))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, True, tokenizer.pad_token_id), pad(labels, True, -100)


def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, dataset: Dataset) -> float:
    """Share of correct rollouts at temperature 1, judged by the text in the box."""
    tokens, golds = [prompt_tokens(prompt, tokenizer, {}) for prompt in dataset["prompt"]], dataset["solution"]
    drawn = sample(model, tokenizer, tokens, Sampling(TOKENS), num_samples=1, batch_size=512)
    right = [c.text.endswith(f"\\boxed{{{golds[i]}}}") for i, completions in drawn for c in completions]
    return sum(right) / len(right)


def worked_policy(
    dataset: Dataset, seed: int, until: float, *, max_steps: int = 4000, every: int = 50, batch: int = 64
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The quickstart's model, supervised on `worked` problems until the share `until` of its rollouts is correct."""
    set_seed(seed)
    random = Random(seed)
    texts = [problem[-1]["content"] for problem in dataset["prompt"][:2000]]
    shown = [worked(text, random) for text in texts]
    tokenizer = build_tokenizer([*texts, *shown, *["assistant\n", "user\n"] * len(texts)])
    model = build_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    ids, labels = encode(tokenizer, dataset, random)
    watched = dataset.select(range(min(256, len(dataset))))
    for step in tqdm(range(1, max_steps + 1), desc="warm start", unit="step", mininterval=5):
        rows = torch.randint(len(ids), (batch,))
        model.train()
        mask = (ids[rows] != tokenizer.pad_token_id).long()
        model(input_ids=ids[rows], attention_mask=mask, labels=labels[rows]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        if step % every == 0 and accuracy(model, tokenizer, watched) >= until:
            break
    return model, tokenizer


def worked_model(dataset: Dataset, seed: int, folder: Path, *, until: float, max_steps: int) -> None:
    """Ensure that `folder` has the model of `worked_policy` (`started`)."""
    settings: dict[str, Any] = {"seed": seed, "until": until, "max_steps": max_steps}
    started(folder, dataset, {"policy": "worked", **settings}, partial(worked_policy, dataset, **settings))
