"""Where the rollouts of a value table come from: a model in this process, or vLLM servers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from basis_rl.engine import Completion, Sampling, end_tokens, sample, sample_servers

T = TypeVar("T")
Rollouts = Iterator[tuple[int, list[Completion]]]


class Request(NamedTuple):
    """Rollouts that are wanted of a `Source`.

    Attributes:
        prompts: tokens of all prompts.
        chunks: indices of prompts that are drawn together (see `Source.chunks`), and the seed of their rollouts.
        sampling: how rollouts are drawn.
        num_rollouts: of each prompt.
    """

    prompts: Sequence[Sequence[int]]
    chunks: Mapping[tuple[int, ...], int]
    sampling: Sampling
    num_rollouts: int


class Source(Protocol):
    """Draws rollouts. What it draws for a chunk of prompts depends on the chunk and its seed alone.

    Attributes:
        name: what else the rollouts depend on.
        config: the model's configuration, which knows where it came from.
        tokenizer: its tokenizer.
    """

    name: str
    config: Any
    tokenizer: PreTrainedTokenizerBase

    def chunks(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Indices of the prompts in chunks that are drawn together, for at most `count` rollouts of each."""
        ...

    def draw(self, request: Request, stop: threading.Event) -> Rollouts:
        """The rollouts of each prompt; ends early, without what is not finished, when `stop` is set."""
        ...


class ModelSource:
    """A model in this process, with transformers generation.

    Each chunk is one batch and has a seed of its own, so that rewards do not depend on what was drawn before it.

    Args:
        model: the reference model, the one that training starts from.
        tokenizer: its tokenizer.
        batch_size: rollouts generated at a time (at least one prompt with all of its rollouts).
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 256) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.config: Any = model.config
        self.name = self.name_for(batch_size)

    @staticmethod
    def name_for(batch_size: int) -> str:
        """`name`, for a caller that has not loaded the model yet."""
        return f"transformers, {batch_size} at a time"

    def chunks(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # of similar length together: less padding
        size = max(1, self.batch_size // count)
        return [order[start : start + size] for start in range(0, len(order), size)]

    def draw(self, request: Request, stop: threading.Event) -> Rollouts:
        device = self.model.device
        for chunk, seed in request.chunks.items():
            if stop.is_set():
                return
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                found = sample(
                    self.model,
                    self.tokenizer,
                    [request.prompts[i] for i in chunk],
                    request.sampling,
                    num_samples=request.num_rollouts,
                    batch_size=request.num_rollouts * len(chunk),
                    stop=stop,
                )
                drawn = list(found)
            for k, completions in drawn:
                yield chunk[k], completions


class ServerSource:
    """vLLM servers. The seed of a request belongs to its prompt: neither order nor number of servers changes it.

    Args:
        urls: of the servers; all serve the same model.
        config: configuration of that model.
        tokenizer: its tokenizer.
        ends: tokens that end a completion; None: the tokenizer's.
        timeout: see `sample_servers`.
        patience: see `sample_servers`.
    """

    name = "vllm"

    def __init__(
        self,
        urls: Sequence[str],
        config: Any,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int] | None = None,
        *,
        timeout: float = 1800.0,
        patience: float = 600.0,
    ) -> None:
        self.urls, self.config, self.tokenizer = list(urls), config, tokenizer
        self.ends = end_tokens(None, tokenizer) if ends is None else list(ends)
        self.timeout, self.patience = timeout, patience

    def chunks(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        return [[index] for index in range(len(prompts))]

    def draw(self, request: Request, stop: threading.Event) -> Rollouts:
        indices = [index for (index,) in request.chunks]
        found = sample_servers(
            self.urls,
            self.tokenizer,
            [request.prompts[i] for i in indices],
            request.sampling,
            num_samples=request.num_rollouts,
            seeds=list(request.chunks.values()),
            stop_token_ids=self.ends,
            timeout=self.timeout,
            patience=self.patience,
            stop=stop,
        )
        for k, completions in found:
            yield indices[k], completions


def ahead(make: Callable[[threading.Event], Iterator[T]], at_most: int) -> Generator[list[T], None, None]:
    """What `make` yields, drawn in a thread of its own while the caller works: in lists of all that is ready.

    Args:
        make: is given an event, and ends soon after it is set.
        at_most: items that may wait, and length of a list.
    """
    stop = threading.Event()
    ready: queue.Queue[T | None] = queue.Queue(at_most)
    failed: list[Exception] = []

    def put(item: T | None) -> None:
        while not stop.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.2)
                return

    def work() -> None:
        try:
            for item in make(stop):
                put(item)
        except Exception as error:
            failed.append(error)
        put(None)  # the end

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        items: list[T | None] = []
        while None not in items:
            items = [ready.get()]
            with suppress(queue.Empty):
                while len(items) < at_most:
                    items.append(ready.get_nowait())
            if found := [item for item in items if item is not None]:
                yield found
        if failed:
            raise failed[0]
    finally:
        stop.set()
        thread.join(30.0)  # a process must not end within a computation of torch's
