"""Several vLLM servers of one run, which together look to it like one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from basis_rl.engine.weights import write_weights
from basis_rl.run.errors import RequestRefused, RolloutError

# Methods of a `TrainingClient` that are called for each server.
_FOR_EACH = {"check_server", "greet", "init_communicator", "close_communicator"}
_FOR_EACH |= {"prove", "reset_prefix_cache", "go_on"}
# What all of them share, or any of them may answer.
_OF_THE_FIRST = {"session", "owner", "folder", "salt", "image_features"}


class Servers:
    """In place of one `TrainingClient`: all servers get the same weights, and each request goes to one of them.

    Weights go through one folder, which is written once. A failure of one server is a failure of all: the run then
    waits until every one of them is well, as it does with a single server. Methods have the meaning of the client's;
    those of `_FOR_EACH` are called for all servers at the same time.

    Args:
        clients: a `TrainingClient` of each server, without NCCL.
    """

    def __init__(self, clients: Sequence[Any]) -> None:
        assert all(each.settings.transfer == "folder" for each in clients)
        self.clients = list(clients)
        first = clients[0]
        self.run = first.run
        # One session, so that a signal ends every wait, and one owner, of which all servers are told.
        for each in clients[1:]:
            each.session = each.server.session = first.session
            each.owner = first.owner
            each.folder = first.folder
        # Not used: servers that load weights from a folder say themselves which ones they have.
        self.probed: tuple[list[int], Tensor] | None = None
        self._choosing = threading.Lock()
        self._in_flight = [0] * len(clients)

    def __getattr__(self, name: str) -> Any:
        if name in _FOR_EACH:
            return partial(self._each, name)
        if name in _OF_THE_FIRST:
            return getattr(self.clients[0], name)
        raise AttributeError(name)

    def get_server_info(self) -> Any:
        """Of a server that does not give the log-probabilities of sampling, if there is one, of which TRL warns."""
        found = self._each("get_server_info")
        return max(found, key=lambda each: each["model_config"]["logprobs_mode"] != "processed_logprobs")

    def hold(self, version: int) -> None:
        """Reserve all servers for this run. If one of them belongs to another run, none is kept."""
        for each in self.clients:
            each.run = self.run
        try:
            self._each("hold", version)
        except RequestRefused:
            self.release()
            raise

    def release(self) -> None:
        """Free all servers for other runs, also at the end by a signal, which would end a wait for them together."""
        for each in self.clients:
            each.release()

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Tensor]]) -> None:
        """Write the weights once; all servers load them."""
        for each in self.clients:
            each.version += 1
        self._each("hold", self.clients[0].version, merged=True)
        try:
            write_weights(self.folder, named_params)
            self._each("load")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def keeping(self, step: int) -> Iterator[None]:
        """Within it all engines stand still."""
        with ExitStack() as stack:
            for each in self.clients:
                with _naming(each):
                    stack.enter_context(each.keeping(step))
            yield

    def prompt_log_probs(self, token_ids: list[int]) -> Tensor:
        """``(S, L - 1)``, of each of the S servers."""
        return torch.stack(self._each("prompt_log_probs", token_ids))

    def complete_one(self, prompt: list[int], most: int, settings: Mapping[str, Any]) -> Any:
        """By the server with the fewest requests in flight."""
        with self._choosing:
            chosen = min(range(len(self.clients)), key=self._in_flight.__getitem__)
            self._in_flight[chosen] += 1
        client = self.clients[chosen]
        try:
            with _naming(client):
                return client.complete_one(prompt, most, settings)
        finally:
            with self._choosing:
                self._in_flight[chosen] -= 1

    def complete(self, prompts: Any, settings: Any, longest: Any = None, features: Any = None) -> dict[str, Any]:
        """Each server draws for an equal share of the prompts."""
        count = len(prompts)
        size = -(-count // len(self.clients))
        parts = [slice(first, first + size) for first in range(0, count, size)]
        shares = [(prompts[part], settings, longest, features and features[part]) for part in parts]
        return joined(self._call("complete", shares))

    def _each(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        return self._call(method, [arguments] * len(self.clients), **named)

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], **named: Any) -> list[Any]:
        """What the first servers return, at the same time, each with its own arguments.

        Raises:
            RequestRefused: one server refuses it, whatever the others do.
            RolloutError: one has failed.
        """
        found: list[Any] = [None] * len(arguments)
        failures: list[BaseException] = []

        def ask(place: int) -> None:
            client = self.clients[place]
            try:
                with _naming(client):
                    found[place] = getattr(client, method)(*arguments[place], **named)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(place,), daemon=True) for place in range(len(arguments))]
        for thread in threads:
            thread.start()
        # A signal to stop ends the wait; the threads end with the process.
        with self.session.interrupting():
            for thread in threads:
                thread.join()
        for error in sorted(failures, key=lambda each: not isinstance(each, RequestRefused)):
            raise error
        return found


def joined(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer to all prompts, from the answers to parts of them."""
    return {
        key: None if answers[0][key] is None else [row for answer in answers for row in answer[key]]
        for key in answers[0]
    }


@contextmanager
def _naming(client: Any) -> Iterator[None]:
    """Within it a failure of the server says which one it is."""
    try:
        yield
    except RolloutError as error:
        raise RolloutError(f"{client.base_url}: {error}") from error
