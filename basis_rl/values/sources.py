"""Where the rollouts of a value table come from: a model in this process, or vLLM servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from basis_rl.engine import Completion, Sampling, end_tokens, sample, sample_servers

Prompts = Sequence[Sequence[int]]
Seeds = Mapping[tuple[int, ...], int]
Drawing = Generator[tuple[int, list[Completion]], None, None]


class Source(ABC):
    """Where rollouts come from.

    Attributes:
        config: of the model.
        tokenizer: its tokenizer.
        name: what the rollouts depend on beside model, prompts, sampling and seeds.
    """

    config: Any
    tokenizer: PreTrainedTokenizerBase
    name: str

    def chunks(self, prompts: Prompts, count: int) -> list[list[int]]:
        """Indices of the prompts in chunks that are drawn together, for at most `count` rollouts of each."""
        return [[index] for index in range(len(prompts))]

    @abstractmethod
    def draw(self, prompts: Prompts, seeds: Seeds, sampling: Sampling, count: int) -> Drawing:
        """Rollouts of prompts as they are ready: index of the prompt, and its `count` rollouts.

        Args:
            prompts: tokens of all prompts.
            seeds: of each chunk of prompts that are drawn together.
            sampling: how.
            count: rollouts of each prompt.
        """


class ModelSource(Source):
    """A model in this process, with transformers generation.

    Each chunk of prompts is one batch and has a seed of its own, so that what is drawn depends on these alone, and not
    on what was drawn before.

    Args:
        model: the reference model, the one that training starts from.
        tokenizer: its tokenizer.
        batch_size: rollouts generated at a time (at least one prompt with all of its rollouts).
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 256) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.config = model.config
        self.name = self.name_for(batch_size)

    @staticmethod
    def name_for(batch_size: int) -> str:
        """`name`, for a caller that has not loaded the model yet."""
        return f"transformers, {batch_size} at a time"

    def chunks(self, prompts: Prompts, count: int) -> list[list[int]]:
        # Prompts of similar length together, for less padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        size = max(1, self.batch_size // count)
        return [order[start : start + size] for start in range(0, len(order), size)]

    def draw(self, prompts: Prompts, seeds: Seeds, sampling: Sampling, count: int) -> Drawing:
        device = self.model.device
        for chunk, seed in seeds.items():
            # Sampling must not change the random numbers of the caller.
            with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
                torch.manual_seed(seed)
                tokens = [prompts[i] for i in chunk]
                size = count * len(chunk)
                drawn = list(sample(self.model, self.tokenizer, tokens, sampling, num_samples=count, batch_size=size))
            for k, completions in drawn:
                yield chunk[k], completions


@dataclass
class ServerSource(Source):
    """vLLM servers. The seed of a request belongs to its prompt: neither order nor number of servers changes it.

    Args:
        urls: of the servers; all serve the same model.
        config: configuration of that model.
        tokenizer: its tokenizer.
        ends: tokens that end a completion; by default the tokenizer's.
        timeout: see `sample_servers`.
        patience: see `sample_servers`.
    """

    urls: Sequence[str]
    config: Any
    tokenizer: PreTrainedTokenizerBase
    ends: Sequence[int] = ()
    timeout: float = 1800.0
    patience: float = 600.0
    name = "vllm"

    def __post_init__(self) -> None:
        self.ends = self.ends or end_tokens(None, self.tokenizer)

    def draw(self, prompts: Prompts, seeds: Seeds, sampling: Sampling, count: int) -> Drawing:
        indices = [index for (index,) in seeds]
        found: Any = sample_servers(
            self.urls,
            self.tokenizer,
            [prompts[i] for i in indices],
            sampling,
            num_samples=count,
            seeds=list(seeds.values()),
            stop_token_ids=self.ends,
            timeout=self.timeout,
            patience=self.patience,
        )
        # Closing aborts the requests that are in flight.
        with closing(found):
            for k, completions in found:
                yield indices[k], completions
