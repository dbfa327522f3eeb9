"""Sampling from vLLM servers over HTTP: many requests in flight, several servers, any of which may die and return."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from basis_rl.engine.local import Completion, Sampling

_CONNECT = 10.0
_ATTEMPTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_IN_FLIGHT = 1024
_Choice = tuple[list[int], bool]


class ServersLost(RuntimeError):
    """No server is left that answers, or one prompt fails again and again. What was yielded before is whole."""


def sample_servers(
    urls: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    seed: int | None = 0,
    seeds: Sequence[int] | None = None,
    stop_token_ids: Sequence[int] = (),
    concurrency: int | None = None,
    timeout: float = 1800.0,
    patience: float = 600.0,
    stop: threading.Event | None = None,
) -> Iterator[tuple[int, list[Completion]]]:
    """Completions of each prompt, as they finish: ``(index of the prompt, its num_samples completions)``.

    As `sample`, from servers as `basis-rl serve` starts them. The samples of one prompt are one request, so that its
    prefill is shared. Each server works on `concurrency` requests at a time and takes the next when one is done: the
    faster one does more. When one dies, its requests go to the others; it is asked for again until `patience` is over.
    Closing the iterator aborts what is in flight.

    A sample depends on weights, prompt, settings and seed, not on the order of the requests; to the last bit only where
    the engine's arithmetic does not depend on what else it computes (vLLM: ``VLLM_BATCH_INVARIANT=1``).

    Args:
        urls: of the servers, ``http://host:port``. VLLM_API_KEY in the environment is sent as their key.
        tokenizer: decodes the completions, as in training; servers cut off what is not a whole character yet.
        prompts: token ids (`prompt_tokens`).
        sampling: how. Every setting is stated in the request; a server takes others from the checkpoint.
            ``generation_kwargs`` are fields of vLLM's request.
        num_samples: completions of each prompt. At temperature 0 they are copies of one.
        seed: the request of prompt i has ``request_seed(seed, i)``; None lets the server draw it.
        seeds: of each request, instead. vLLM gives sample k of a request the seed + k: keep them apart.
        stop_token_ids: end tokens besides the tokenizer's own, which servers of ours do not read from the checkpoint.
        concurrency: requests in flight at each server; default: enough for 1,024 sequences, 8 to 256.
        timeout: seconds that one request may take.
        patience: seconds that a server which fails is waited for.
        stop: when another thread sets it, the iteration ends, and what is in flight is aborted.

    Raises:
        ValueError: no server or one that refuses a request (HTTP 4xx), or prompts too long for it.
        ServersLost: all servers are gone for longer than `patience`, or a prompt failed five times.
    """
    servers = _servers_for(urls, timeout, max((len(prompt) for prompt in prompts), default=0), sampling.max_new_tokens)
    if seeds is None and seed is not None:
        seeds = [request_seed(seed, index) for index in range(len(prompts))]
    if seeds is not None and len(seeds) != len(prompts):
        raise ValueError(f"There are {len(seeds)} seeds for {len(prompts)} prompts.")
    copies = num_samples if sampling.temperature == 0 else 1  # vLLM refuses n > 1 of a greedy request
    body = _body(sampling, num_samples // copies, stop_token_ids)
    at_a_time = concurrency or min(256, max(8, _IN_FLIGHT // num_samples))
    return _completions(_Requests(servers, prompts, body, seeds, at_a_time, patience, stop), tokenizer, copies)


def _servers_for(urls: Sequence[str], timeout: float, longest: int, new_tokens: int) -> list[_Server]:
    """The servers; refuses prompts of `longest` tokens that leave one of them no room for `new_tokens`."""
    if not urls:
        raise ValueError("There is no server to sample from: give the URL of one, started with `basis-rl serve MODEL`.")
    servers = [_Server(url, timeout) for url in urls]
    away: list[_Away] = []
    for server in servers:
        try:
            limit = server.model().get("max_model_len")
        except _Away as error:  # it may come back, and the others do without it meanwhile
            away.append(error)
            continue
        if limit is not None and longest + new_tokens > limit:
            raise ValueError(
                f"The longest prompt has {longest} tokens; with {new_tokens} for the completion that is more than the "
                f"{limit} of the server at {server.url}. Start it with --max-model-len {longest + new_tokens}, or drop "
                "the long prompts."
            )
    if len(away) == len(servers):
        raise away[0]
    return servers


def request_seed(seed: int, *keys: object) -> int:
    """53 bits of a hash over seed and keys: requests get seeds that are far apart, the same in every run."""
    text = ":".join(map(str, (seed, *keys)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11


def served_model(url: str) -> dict[str, Any]:
    """What a server says of its model: ``id``, ``root`` (folder or Hub id), ``max_model_len``.

    Raises:
        ValueError: it cannot be reached, or is not a server of this kind.
    """
    return _Server(url, _CONNECT).model()


def _completions(
    requests: _Requests, tokenizer: PreTrainedTokenizerBase, copies: int
) -> Iterator[tuple[int, list[Completion]]]:
    with closing(requests.results()) as results:
        for index, choices in results:
            texts = tokenizer.batch_decode([token_ids for token_ids, _ in choices], skip_special_tokens=True)
            yield index, copies * [Completion(text, *choice) for text, choice in zip(texts, choices, strict=True)]


def _body(sampling: Sampling, n: int, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "n": n,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(stop_token_ids),
        "return_token_ids": True,
        "stream": False,
    }
    return {**settings, **sampling.generation_kwargs}


class _Server:
    """One server. Each request has a connection of its own, so that closing it aborts just this one."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{url}' is not the URL of a server, such as http://127.0.0.1:8000.")
        self.host, self.port, self.path = parts.hostname, parts.port, parts.path
        self.kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        key = os.environ.get("VLLM_API_KEY")
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self.failures = 0
        self.failing_since: float | None = None
        self.open: set[http.client.HTTPConnection] = set()
        self.closed = False

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The server's answer, parsed where it is JSON.

        Raises:
            ValueError: HTTP 4xx: the request is wrong, and would be each time.
            ConnectionRefusedError, OSError: it did not get there.
            _Failed: it did, and there is no answer.
        """
        connection = self.kind(self.host, self.port, timeout=_CONNECT)
        connection.connect()
        self.open.add(connection)
        try:
            if self.closed:
                raise _Failed("closed")
            connection.sock.settimeout(timeout or self.timeout)
            method = "GET" if body is None else "POST"
            connection.request(method, self.path + path, json.dumps(body) if body else None, self.headers)
            response = connection.getresponse()
            content = response.read()
            if 400 <= response.status < 500 and response.status not in (408, 429):
                raise _refused(self.url, response.status, content)
            if response.status != 200:
                raise _Failed(f"HTTP {response.status}: {content[:300].decode(errors='replace')}")
            return json.loads(content) if content else None
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise _Failed(f"{type(error).__name__}: {error}") from error
        finally:
            self.open.discard(connection)
            connection.close()

    def model(self) -> dict[str, Any]:
        """See `served_model`."""
        try:
            found: dict[str, Any] = self.ask("/v1/models", timeout=_CONNECT)["data"][0]
        except (_Failed, OSError, KeyError, IndexError, TypeError) as error:
            raise _Away(
                f"There is no vLLM server at {self.url} ({error}). Start one with `basis-rl serve MODEL`."
            ) from error
        return found

    def complete(self, body: dict[str, Any]) -> list[_Choice]:
        """Token ids of each completion of one request, in the order of their seeds, and whether it was cut off."""
        choices = sorted(self.ask("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
        if len(choices) != body["n"] or any(choice["finish_reason"] not in ("stop", "length") for choice in choices):
            reasons = [choice["finish_reason"] for choice in choices]
            raise _Failed(f"asked for {body['n']} completions, got some that ended by {reasons}")
        if any(choice.get("token_ids") is None for choice in choices):
            raise ValueError(f"The server at {self.url} returns no token ids; vLLM 0.22 or newer does.")
        return [(choice["token_ids"], choice["finish_reason"] == "length") for choice in choices]

    def close(self) -> None:
        """End all requests in flight; the server aborts requests that no client waits for."""
        self.closed = True
        for connection in list(self.open):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


class _Away(ValueError):
    """There is no server, or it does not answer now."""


class _Failed(Exception):
    """A request that reached a server and came to nothing."""


def _refused(url: str, status: int, content: bytes) -> ValueError:
    with suppress(ValueError, KeyError, TypeError):
        content = json.loads(content)["error"]["message"].encode()
    return ValueError(
        f"The server at {url} refuses a request (HTTP {status}): {content[:500].decode(errors='replace')}"
    )


class _Requests:
    """The requests of one call: threads that take prompts from a common queue, and results that wait to be taken."""

    def __init__(
        self,
        servers: list[_Server],
        prompts: Sequence[Sequence[int]],
        body: dict[str, Any],
        seeds: Sequence[int] | None,
        concurrency: int,
        patience: float,
        stop: threading.Event | None,
    ) -> None:
        self.servers, self.prompts, self.body, self.seeds = servers, prompts, body, seeds
        self.patience = patience
        self.at_a_time = min(concurrency, len(prompts))
        self.waiting = deque(range(len(prompts)))
        self.attempts: dict[tuple[int, str], int] = {}
        self.lost: set[str] = set()
        self.unfinished = len(prompts)
        self.running = 0
        self.changed = threading.Condition()
        self.asked_to_stop = stop or threading.Event()
        self.stopping = threading.Event()
        # Bounded: who scores more slowly than the servers generate holds them up, and does not fill the memory.
        self.done: queue.Queue[tuple[int, list[_Choice]] | Exception] = queue.Queue(max(4, self.at_a_time // 4))

    def results(self) -> Generator[tuple[int, list[_Choice]], None, None]:
        threads = [
            threading.Thread(target=self._work, args=(server,), daemon=True)
            for _ in range(self.at_a_time)
            for server in self.servers
        ]
        self.running = len(threads)
        try:
            for thread in threads:
                thread.start()
            for _ in range(len(self.prompts)):
                result = self._next()
                if result is None:
                    return
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            self.stopping.set()
            with self.changed:
                self.changed.notify_all()
            for server in self.servers:
                server.close()
            for thread in threads:
                if thread.is_alive():
                    thread.join(0.5)

    def _next(self) -> tuple[int, list[_Choice]] | Exception | None:
        """The next result; None if it was asked to stop."""
        while not self.asked_to_stop.is_set():
            with suppress(queue.Empty):
                return self.done.get(timeout=0.2)
        return None

    def _work(self, server: _Server) -> None:
        why: Exception = ServersLost("")
        try:
            while (index := self._take()) is not None:
                try:
                    choices = server.complete(self._request(index))
                except (OSError, _Failed) as error:
                    why = error
                    self._give_back(index, server, error)
                    if not self._back(server):
                        return
                else:
                    server.failures, server.failing_since = 0, None
                    with self.changed:
                        self.unfinished -= 1
                        self.changed.notify_all()
                    self._hand_over((index, choices))
        except Exception as error:  # refused, or a fault of ours: whoever waits must hear of it
            self._hand_over(error)
        finally:
            with self.changed:
                self.running -= 1
                last = self.running == 0 and self.unfinished > 0
            if last:
                urls = ", ".join(each.url for each in self.servers)
                self._hand_over(
                    ServersLost(f"No vLLM server is left at {urls}: none within {self.patience:g} s (the last: {why}).")
                )

    def _take(self) -> int | None:
        """The next prompt; None when there is none any more. One that a dying server holds may still come back."""
        with self.changed:
            while not self.waiting and self.unfinished and not self.stopping.is_set():
                self.changed.wait()
            return self.waiting.popleft() if self.waiting and not self.stopping.is_set() else None

    def _request(self, index: int) -> dict[str, Any]:
        own = {"prompt": list(self.prompts[index])}
        return {**self.body, **own, **({} if self.seeds is None else {"seed": self.seeds[index]})}

    def _give_back(self, index: int, server: _Server, error: Exception) -> None:
        with self.changed:
            server.failures += 1
            server.failing_since = server.failing_since or time.monotonic()
            if isinstance(error, _Failed) and not self.stopping.is_set():
                self.attempts[index, server.url] = self.attempts.get((index, server.url), 0) + 1
                left = [each.url for each in self.servers if each.url not in self.lost]
                # not one sick server alone; when none is left, that is what is said
                if left and all(self.attempts.get((index, url), 0) >= _ATTEMPTS for url in left):
                    raise ServersLost(
                        f"The request of prompt {index} failed {_ATTEMPTS} times, at last at {server.url}: {error}"
                    )
            self.waiting.append(index)
            self.changed.notify()

    def _back(self, server: _Server) -> bool:
        """Wait until the server is healthy, longer each time; whether it is, before patience ends.

        One that says it is, and answers no request within that time, is not.
        """
        while True:
            since = server.failing_since or time.monotonic()
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(server.failures, 10))
            if self.stopping.wait(pause):
                return False
            try:
                server.ask("/health", timeout=_CONNECT)
                healthy = True
            except (OSError, ValueError, _Failed):
                healthy = False
            if time.monotonic() - since > self.patience:
                self.lost.add(server.url)
                return False
            if healthy:
                return True

    def _hand_over(self, result: tuple[int, list[_Choice]] | Exception) -> None:
        while not self.stopping.is_set():
            with suppress(queue.Full):
                self.done.put(result, timeout=0.2)
                return
