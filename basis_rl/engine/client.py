"""The HTTP client of vLLM servers: one kind of session for every request, and sampling from several servers at once."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import queue
import reprlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from transformers import PreTrainedTokenizerBase

from basis_rl.engine.local import Completion, Sampling
from basis_rl.run.errors import RequestRefused, RolloutError, WrongAnswer
from basis_rl.run.http import BoundedSession

# Seconds for the answer of a small request.
_CONNECT = 10.0
# Seconds between two checks of a server that fails; they grow from the first to the longest.
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
# Sequences that are requested at a time from one server.
_IN_FLIGHT = 1024
# Seconds after which a waiting thread checks whether it is to stop.
_POLL = 0.2
# Log-probabilities are between these: what is above 0 comes of rounding.
_LEAST = -1e30
_ROUNDING = 1e-3
_logger = logging.getLogger(__name__)
_Choice = tuple[list[int], bool]


class ServersLost(RuntimeError):
    """No server answers any more. Everything that was yielded before is complete."""


class NoServer(ValueError):
    """There is no server at this address, or it does not answer now."""


class Session(BoundedSession):
    """The session of every request to a vLLM server: with time limits, and without repetition.

    Nothing is repeated here because it is unknown what a failed request did: the server may still be generating.

    Args:
        timeout: seconds until an answer is complete.

    Attributes:
        interrupting: a context within which a signal to stop ends the wait for an answer.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__(_IN_FLIGHT)
        self.timeout = timeout
        self.interrupting: Callable[[], AbstractContextManager[None]] = nullcontext
        # Servers are machines of the same network, so proxies of the environment do not apply.
        self.trust_env = False
        self.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or True
        # No keep-alive: the server may close a connection just when the next request is sent, which must not be
        # repeated.
        self.headers["Connection"] = "close"
        if key := os.environ.get("VLLM_API_KEY"):
            self.headers["Authorization"] = f"Bearer {key}"

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """As in `requests`, but a failure raises `RequestRefused` or `RolloutError`. A 404 is returned: TRL has a
        message for it."""
        kwargs["timeout"] = kwargs.get("timeout") or self.timeout
        try:
            with self.interrupting():
                response = super().request(*args, **kwargs)
        except requests.TooManyRedirects as error:
            raise RequestRefused(f"The vLLM server at {args[1]} answers with {error}. Name that address.") from error
        except requests.RequestException as error:
            raise RolloutError(f"{type(error).__name__}: {error}") from error
        if response.status_code not in (200, 404):
            raise _failure(response)
        return response


def _failure(response: requests.Response) -> RequestRefused | RolloutError:
    """HTTP 4xx is the request's fault, unless the server was slow (408) or busy (429)."""
    status = response.status_code
    said = response.content.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        said = str(json.loads(said)["error"]["message"])
    if 400 <= status < 500 and status not in (408, 429):
        base = response.url.removesuffix(urlsplit(response.url).path)
        return RequestRefused(f"The vLLM server at {base} refuses a request (HTTP {status}): {said[:500]}")
    return RolloutError(f"HTTP {status}: {said[:500]}")


@dataclass(frozen=True)
class ServedModel:
    """What a server says about its model.

    Attributes:
        names: the names that the server answers to, and what they were loaded from (folder or Hub id).
        max_model_len: prompt and completion together, in tokens; None if the server does not say.
    """

    names: tuple[str, ...]
    max_model_len: int | None


class Client:
    """One vLLM server.

    Args:
        url: ``http://host:port``.
        timeout: seconds that one request may take.
    """

    def __init__(self, url: str, timeout: float = _CONNECT) -> None:
        self.url = (url if "//" in url else f"http://{url}").rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{url}' is not the URL of a server, such as http://127.0.0.1:8000.")
        self.session = Session(timeout)

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The server's answer, parsed; a POST request if there is a `body`.

        Raises:
            RequestRefused: HTTP 4xx: the request is wrong, so it would fail again.
            RolloutError: there is no answer.
        """
        method = "GET" if body is None else "POST"
        response = self.session.request(method, self.url + path, json=body, timeout=timeout)
        if response.status_code != 200:
            raise _failure(response)
        try:
            return json.loads(response.content) if response.content else None
        except (ValueError, RecursionError) as error:
            raise RolloutError(f"{self.url}{path} does not answer with JSON: {error}") from error

    def is_healthy(self, timeout: float = _CONNECT) -> bool:
        """Whether ``/health`` answers."""
        try:
            self.ask("/health", timeout=timeout)
        except (RolloutError, RequestRefused):
            return False
        return True

    def model(self) -> ServedModel:
        """What is served.

        Raises:
            NoServer: it cannot be reached, or is not a vLLM server.
            ValueError: it refuses to answer.
        """
        try:
            cards = self.ask("/v1/models", timeout=_CONNECT)["data"]
            names = [card.get(key) for card in cards for key in ("id", "root") if card.get(key)]
            lengths = [card["max_model_len"] for card in cards if card.get("max_model_len")]
        except RequestRefused as error:
            raise ValueError(str(error)) from error
        except (RolloutError, KeyError, TypeError, AttributeError) as error:
            raise NoServer(
                f"There is no vLLM server at {self.url} ({error}). Start one with `basis-rl serve MODEL`."
            ) from error
        return ServedModel(tuple(dict.fromkeys(names)), min(lengths, default=None))

    def cache_tokens(self) -> int | None:
        """Tokens that the KV caches of all replicas have room for; None if the server does not say."""
        try:
            config = self.ask("/server_info?config_format=json", timeout=_CONNECT)["vllm_config"]
            replicas = int(config["parallel_config"]["data_parallel_size"])
            return replicas * int(config["cache_config"]["kv_cache_size_tokens"])
        except (RolloutError, RequestRefused, KeyError, TypeError, ValueError):
            return None

    def complete(self, body: dict[str, Any]) -> list[_Choice]:
        """Token ids of each completion of one request, in the order of their seeds, and whether it was cut off."""
        choices = checked_choices(self.url, body, self.ask("/v1/completions", body))
        return [(choice["token_ids"], choice["finish_reason"] != "stop") for choice in choices]


def server_urls(base_url: str | None, host: str = "0.0.0.0", port: int = 8000) -> list[str]:
    """The URLs of the servers in `base_url`, which separates them by commas; without it, that of one at host and port.

    Raises:
        ValueError: one of them is not a URL, or is repeated.
    """
    text = f"http://{host}:{port}" if base_url is None else base_url
    urls = [Client(each.strip()).url for each in text.split(",")]
    if repeated := sorted({each for each in urls if urls.count(each) > 1}):
        raise ValueError(f"vllm_server_base_url has {repeated[0]} more than once. Name each server once.")
    return urls


def check_served(url: str, model: str) -> int | None:
    """Tokens that fit into the server at `url`, prompt and completion together; None if it does not say.

    Raises:
        ValueError: there is no server, or it has another model.
    """
    served = Client(url).model()
    if model not in served.names and Path(model).resolve() not in {Path(name).resolve() for name in served.names}:
        has = f"The server at {url} has the model {', '.join(sorted(served.names))}, not '{model}'"
        raise ValueError(f"{has}. Name that model, or start a server with `basis-rl serve {model}`.")
    return served.max_model_len


def checked_choices(
    url: str, body: Mapping[str, Any], answer: Any, vocabulary: int | None = None
) -> list[dict[str, Any]]:
    """The completions of an answer, prompt by prompt, checked against the request.

    Args:
        url: of the server.
        body: the request, with prompts (or one prompt) of token ids.
        answer: to it.
        vocabulary: how many token ids the model has.

    Raises:
        WrongAnswer: they are not; the message names server, field, what was expected and what came.
        RolloutError: the server has aborted a completion.
    """

    def require(holds: bool, field: str, expected: str, found: Any) -> None:
        if not holds:
            raise WrongAnswer(
                f"The vLLM server at {url} answered with {field} {reprlib.repr(found)[:80]}; expected was {expected}. "
                "Nothing of the answer is used. Does `basis-rl serve` of this version run there, without a proxy?"
            )

    settings = body.get("sampling_params", body)
    prompts = [body["token_ids"]] if "token_ids" in body else body["prompt"]
    prompts = prompts if isinstance(prompts[0], Sequence) else [prompts]
    count = len(prompts) * settings["n"]
    found = answer.get("choices") if isinstance(answer, dict) else answer
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    indices: list[Any] = [row.get("index") for row in rows]
    numbered = all(type(index) is int for index in indices) and sorted(indices) == list(range(count))
    require(numbered, "choices of index", f"0 to {count - 1}", indices if rows else found)
    rows.sort(key=lambda row: row["index"])
    for row, prompt in zip(rows, (prompt for prompt in prompts for _ in range(settings["n"])), strict=True):
        name = f"choices[{row['index']}]"
        if row.get("finish_reason") not in ("stop", "length", "repetition"):
            raise RolloutError(f"{name} ended by {reprlib.repr(row.get('finish_reason'))}")
        if "prompt" in body:
            asked = row.get("prompt_token_ids")
            require(asked == list(prompt), f"{name}.prompt_token_ids", str(list(prompt)[:12]), asked)
        ids: Any = row.get("token_ids")
        require(isinstance(ids, list), f"{name}.token_ids", "a list (vLLM 0.22 or newer)", ids)
        most = settings["max_tokens"]
        require(0 < len(ids) <= most, f"{name}.token_ids of length", f"1 to {most}", len(ids))
        known = {type(each) for each in ids} == {int} and min(ids) >= 0 and max(ids) < (vocabulary or math.inf)
        require(known, f"{name}.token_ids", f"ids from 0 to {'' if vocabulary is None else vocabulary - 1}", ids)
        if settings.get("logprobs") is not None:
            tokens, values = _log_probs(row.get("logprobs"))
            named = [f"token_id:{each}" for each in ids]
            require(tokens == named, f"{name}.logprobs of tokens", f"those of its {len(ids)} token_ids", tokens)
            # As a comparison, which is False for NaN and knows integers that are too large for a float.
            logs = all(type(value) in (int, float) and _LEAST < value < _ROUNDING for value in values)
            require(logs and len(values) == len(ids), f"{name}.logprobs", f"{len(ids)} finite numbers up to 0", values)
    return rows


def _log_probs(given: Any) -> tuple[list[Any], list[Any]]:
    """Tokens and log-probabilities, as completions or as chat completions have them; empty where they are neither."""
    with suppress(KeyError, TypeError):
        if "content" in given:
            return [each["token"] for each in given["content"]], [each["logprob"] for each in given["content"]]
        return list(given["tokens"]), list(given["token_logprobs"])
    return [], []


def request_seed(seed: int, *keys: object) -> int:
    """53 bits of a hash over seed and keys: requests get seeds that are far apart, the same in every run."""
    text = ":".join(map(str, (seed, *keys)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11


def sample_servers(
    urls: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[int],
    num_samples: int = 1,
    stop_token_ids: Sequence[int] = (),
    concurrency: int | None = None,
    timeout: float = 1800.0,
    patience: float = 600.0,
) -> Iterator[tuple[int, list[Completion]]]:
    """Completions of each prompt, as they finish: ``(index of the prompt, its num_samples completions)``.

    As `sample`, from servers that `basis-rl serve` started (with VLLM_API_KEY as their key, if it is set). When a
    server dies, the others take over its requests. Closing the iterator aborts what is in flight. A sample depends on
    weights, prompt, settings and seed, not on the order of the requests; to the last bit only with
    ``VLLM_BATCH_INVARIANT=1``, with which vLLM's arithmetic does not depend on what else it computes.

    Args:
        urls: of the servers, ``http://host:port``.
        tokenizer: decodes the completions, as in training; servers cut off what is not a whole character yet.
        prompts: token ids (`prompt_tokens`).
        sampling: every setting is stated in the request; ``generation_kwargs`` are fields of vLLM's request.
        seeds: one for each prompt (`request_seed`). vLLM gives sample k of a request the seed + k: keep them apart.
        num_samples: completions per prompt. At temperature 0 they are copies of one.
        stop_token_ids: end tokens besides the tokenizer's own, which our servers do not read from the checkpoint.
        concurrency: requests in flight per server; default: enough for 1,024 sequences, 8 to 256.
        timeout: seconds that one request may take.
        patience: seconds to wait for a server that fails.

    Raises:
        ValueError: there is no server, one refuses a request (HTTP 4xx), or prompts are too long for it.
        ServersLost: all servers failed for longer than `patience`.
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    clients = _clients(urls, timeout, longest, sampling.max_new_tokens)
    if len(seeds) != len(prompts):
        raise ValueError(f"There are {len(seeds)} seeds for {len(prompts)} prompts.")
    # vLLM refuses n > 1 for a greedy request, whose completions would all be the same.
    copies = num_samples if sampling.temperature == 0 else 1
    body = _body(sampling, num_samples // copies, stop_token_ids)

    def body_of(index: int) -> dict[str, Any]:
        return {**body, "prompt": list(prompts[index]), "seed": seeds[index]}

    in_flight = min(concurrency or min(256, max(8, _IN_FLIGHT // num_samples)), len(prompts))
    results = _Dispatch(clients, len(prompts), body_of, in_flight, patience).results()
    return _completions(results, tokenizer, copies)


def _clients(urls: Sequence[str], timeout: float, longest: int, new_tokens: int) -> list[Client]:
    """Clients of the servers; refuses prompts of `longest` tokens that leave one of them no room for `new_tokens`."""
    if not urls:
        raise ValueError("There is no server to sample from: give the URL of one, started with `basis-rl serve MODEL`.")
    clients = [Client(url, timeout) for url in urls]
    away: list[NoServer] = []
    for client in clients:
        try:
            limit = client.model().max_model_len
        except NoServer as error:
            # It may come back; until then the other servers do its share.
            away.append(error)
            continue
        if limit is not None and longest + new_tokens > limit:
            raise ValueError(
                f"The longest prompt has {longest} tokens; with {new_tokens} for the completion that is more than the "
                f"{limit} of the server at {client.url}. Start it with --max-model-len {longest + new_tokens}, or drop "
                "the long prompts."
            )
    if len(away) == len(clients):
        raise away[0]
    return clients


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


def _completions(
    results: Generator[tuple[int, list[_Choice]], None, None], tokenizer: PreTrainedTokenizerBase, copies: int
) -> Iterator[tuple[int, list[Completion]]]:
    with closing(results):
        for index, choices in results:
            texts = tokenizer.batch_decode([token_ids for token_ids, _ in choices], skip_special_tokens=True)
            yield index, copies * [Completion(text, *choice) for text, choice in zip(texts, choices, strict=True)]


@dataclass(eq=False)
class _Dispatch:
    """The requests of one call: threads take prompts from a common queue, and put results into another."""

    servers: Sequence[Client]
    count: int
    body_of: Callable[[int], dict[str, Any]]
    in_flight: int
    patience: float

    def __post_init__(self) -> None:
        self.waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(self.count):
            self.waiting.put(index)
        # By URL: when the first failure since the last success was.
        self.failing_since: dict[str, float] = {}
        self.last_error: Exception | None = None
        self.stopping = threading.Event()
        # Bounded, so that results do not fill the memory if the caller scores more slowly than the servers generate.
        self.done: queue.Queue[tuple[int, list[_Choice]] | Exception] = queue.Queue(max(4, self.in_flight // 4))

    def results(self) -> Generator[tuple[int, list[_Choice]], None, None]:
        threads = [
            threading.Thread(target=self._work, args=(server,), daemon=True)
            for _ in range(self.in_flight)
            for server in self.servers
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in range(self.count):
                result = self._next(threads)
                if isinstance(result, RequestRefused):
                    raise ValueError(str(result)) from result
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            self.stopping.set()
            for server in self.servers:
                # The server stops generating when no client waits.
                server.session.abort()
            for thread in threads:
                if thread.is_alive():
                    thread.join(0.5)

    def _next(self, threads: Sequence[threading.Thread]) -> tuple[int, list[_Choice]] | Exception:
        """The next result."""
        while True:
            working = any(thread.is_alive() for thread in threads)
            try:
                return self.done.get(timeout=_POLL)
            except queue.Empty:
                if not working:
                    urls = ", ".join(server.url for server in self.servers)
                    return ServersLost(
                        f"No vLLM server is left at {urls}: none answered within {self.patience:g} s "
                        f"(last error: {self.last_error})."
                    )

    def _work(self, server: Client) -> None:
        try:
            while not self.stopping.is_set():
                try:
                    # An empty queue is not the end: a server that fails gives its prompt back.
                    index = self.waiting.get(timeout=_POLL)
                except queue.Empty:
                    continue
                try:
                    choices = server.complete(self.body_of(index))
                except RolloutError as error:
                    self.waiting.put(index)
                    if not self._is_back(server, error):
                        return
                else:
                    self.failing_since.pop(server.url, None)
                    self._hand_over((index, choices))
        except Exception as error:
            # A refusal or a bug: the caller must see it.
            self._hand_over(error)

    def _is_back(self, server: Client, error: RolloutError) -> bool:
        """Wait until a server that failed is healthy, longer each time; False if `patience` ends first.

        A server that is healthy but has answered no request within that time counts as lost.
        """
        self.last_error = error
        if server.url not in self.failing_since and not self.stopping.is_set():
            message = "The vLLM server at %s failed (%s). Waiting for it, %g s at most."
            _logger.warning(message, server.url, error, self.patience)
        first = self.failing_since.setdefault(server.url, time.monotonic())
        while True:
            # Another thread's request may have been answered meanwhile.
            waited = time.monotonic() - self.failing_since.get(server.url, first)
            if waited > self.patience or self.stopping.wait(min(_LONGEST_PAUSE, _FIRST_PAUSE + waited)):
                return False
            if server.is_healthy():
                return True

    def _hand_over(self, result: tuple[int, list[_Choice]] | Exception) -> None:
        while not self.stopping.is_set():
            with suppress(queue.Full):
                self.done.put(result, timeout=_POLL)
                return
