"""Where the rollouts of a value table come from: a model in this process, vLLM servers, or an earlier build."""

from __future__ import annotations

import base64
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from basis_rl.engine import Completion, Sampling, end_tokens, sample, sample_servers
from basis_rl.engine.client import request_seed
from basis_rl.run.artefacts import differences
from basis_rl.values.provenance import fingerprint
from basis_rl.values.shards import Shards, begun

Prompts = Sequence[Sequence[int]]
Seeds = Mapping[tuple[int, ...], int]
Drawing = Generator[tuple[int, list[Completion]], None, None]
# The facts that depend on the reward, which may change: it also decides which rows are dropped and which columns count.
_OF_THE_REWARD = frozenset({"reward", "reward_code", "dataset"})


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


def kept_folder(table: Path) -> Path:
    """Where the rollouts of a table are."""
    return table.with_name(f"{table.name}.rollouts")


def pack(prompt: Sequence[int], rollouts: Sequence[Completion]) -> str:
    """A prompt's tokens, as a fingerprint, and its rollouts as one compressed line."""
    text = json.dumps([fingerprint(str(list(prompt))), rollouts])
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack(packed: str) -> tuple[str, list[Completion]]:
    """Inverse of `pack`."""
    prompt, rollouts = json.loads(zlib.decompress(base64.b64decode(packed)))
    return prompt, [Completion(*rollout) for rollout in rollouts]


class KeptSource(Source):
    """The rollouts of an earlier build, in place of those of a model or a server.

    Args:
        folder: `kept_folder` of the table.
        config: of the model.
        tokenizer: its tokenizer.

    Raises:
        ValueError: no rollouts are kept there.
    """

    def __init__(self, folder: Path, config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.folder = folder
        self.config = config
        self.tokenizer = tokenizer
        self.identity = begun(folder)
        if not self.identity:
            way_out = "Build the table with --values_keep_rollouts true first, which samples once"
            raise ValueError(f"--values_regrade: there are no rollouts in '{folder}'. {way_out}.")
        self.name = self.identity["sampler"]
        seed = self.identity["seed"]
        records = Shards(folder, self.identity).records()
        self._packed = {request_seed(seed, each.part, each.prompt_id): each.rollouts for each in records}

    def check(self, identity: Mapping[str, Any]) -> None:
        """Refuse a build that would sample otherwise.

        Raises:
            ValueError: says where the two differ.
        """

        def sampled(facts: Mapping[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in facts.items() if key not in _OF_THE_REWARD}

        if differing := differences(sampled(self.identity), sampled(json.loads(json.dumps(identity)))):
            found = f"the rollouts in '{self.folder}' were sampled otherwise"
            way_out = "Only the reward may change. Set these back, or build the table without --values_regrade."
            raise ValueError("\n  ".join([f"--values_regrade: {found}:", *differing]) + f"\n{way_out}")

    def draw(self, prompts: Prompts, seeds: Seeds, sampling: Sampling, count: int) -> Drawing:
        """Nothing is sampled.

        Raises:
            ValueError: the rollouts of a prompt were not kept.
        """
        for (index,), seed in seeds.items():
            packed = self._packed.get(seed)
            prompt, rollouts = unpack(packed) if packed else ("", [])
            if prompt != fingerprint(str(list(prompts[index]))):
                missing = f"'{self.folder}' has no rollouts of the dataset's prompt {index}"
                why = "the prompt was another one, or its rollouts were not all kept"
                raise ValueError(f"--values_regrade: {missing}: {why}. Build the table without --values_regrade.")
            yield index, rollouts
