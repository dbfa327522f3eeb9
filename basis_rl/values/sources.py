"""Where the rollouts of a value table come from: a model in this process, or vLLM servers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from basis_rl.engine import Completion, Sampling, end_tokens, sample, sample_servers
from basis_rl.engine.client import request_seed

T = TypeVar("T")
Rollouts = Iterator[tuple[int, list[Completion]]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Rollouts that are wanted of a `Source`.

    Attributes:
        chunks: indices of prompts that are drawn together, see `Source.chunks`.
        prompts: tokens of all prompts.
        ids: their ids.
        sampling: how rollouts are drawn.
        count: of each prompt.
        part: of the build: what a prompt's second part draws is not what its first one has drawn.
        seed: of the build.
    """

    chunks: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]]
    ids: Sequence[str]
    sampling: Sampling
    count: int
    part: int
    seed: int

    def seed_of(self, *indices: int) -> int:
        """Of the rollouts of these prompts, drawn together."""
        return request_seed(self.seed, self.part, *(self.ids[i] for i in indices))


class Source(Protocol):
    """Draws rollouts. What it draws for a chunk of prompts depends on chunk, part and seed alone.

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
        for chunk in request.chunks:
            if stop.is_set():
                return
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(request.seed_of(*chunk))
                found = sample(
                    self.model,
                    self.tokenizer,
                    [request.prompts[i] for i in chunk],
                    request.sampling,
                    num_samples=request.count,
                    batch_size=request.count * len(chunk),
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
        indices = [index for chunk in request.chunks for index in chunk]
        found = sample_servers(
            self.urls,
            self.tokenizer,
            [request.prompts[i] for i in indices],
            request.sampling,
            num_samples=request.count,
            seeds=[request.seed_of(i) for i in indices],
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
    ready: queue.Queue[T | _End] = queue.Queue(at_most)

    def put(item: T | _End) -> None:
        while not stop.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.2)
                return

    def work() -> None:
        try:
            for item in make(stop):
                put(item)
            put(_End(None))
        except Exception as error:
            put(_End(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            items = [ready.get()]
            with suppress(queue.Empty):
                while len(items) < at_most:
                    items.append(ready.get_nowait())
            whole = [item for item in items if not isinstance(item, _End)]
            if whole:
                yield whole
            if isinstance(items[-1], _End):
                if items[-1].error is not None:
                    raise items[-1].error
                return
    finally:
        stop.set()
        thread.join(30.0)  # a process must not end within a computation of torch's


class _End:
    def __init__(self, error: Exception | None) -> None:
        self.error = error
