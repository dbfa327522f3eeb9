"""A chat model behind an OpenAI-compatible address: many questions at once, each with its time limit and retries."""

from __future__ import annotations

import json
import logging
import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies, select_proxy

from basis_rl.rewards.variables import variables, without_values

# Seconds to connect.
_CONNECT = 10.0
# Seconds between two attempts, at most; they double from one second on.
_LONGEST_PAUSE = 8.0
# Bytes of an answer, at most.
_MOST_BYTES = 4 << 20
# Seconds after which a wait is logged, then after twice as many, and so on.
_NOTICE = 30.0
# HTTP statuses besides 5xx after which the same request may succeed: too slow, conflict, too many requests.
_PASSING = (408, 409, 429)
_log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """The model did not answer; the message says why. `again`: another attempt may succeed."""

    def __init__(self, why: str, again: bool = False) -> None:
        super().__init__(why)
        self.again = again


class ChatModel:
    """Asks a model, with one message per question.

    The proxies of the environment apply (HTTPS_PROXY, NO_PROXY). Redirects are not followed.

    Args:
        base_url: up to and with ``/v1``.
        model: its name there.
        api_key_env: name of the environment variable with the key; None for no key.
        concurrency: requests in flight, at most.
        timeout: seconds for one attempt.
        max_retries: further attempts of a request that was not answered.
        generation_kwargs: further entries of each request.

    Raises:
        ValueError: not an address, or no such variable.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str | None,
        concurrency: int,
        timeout: float,
        max_retries: int,
        generation_kwargs: Mapping[str, Any],
    ) -> None:
        parts = urlsplit(str(base_url))
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(
                "base_url must be an address such as http://127.0.0.1:8000/v1, without a name or password in it "
                "(api_key_env names the variable with the key)."
            )
        self.base_url = str(base_url).rstrip("/")
        self.model = model
        self.concurrency = concurrency
        self.timeout = timeout
        self.max_retries = max_retries
        self.generation_kwargs = dict(generation_kwargs)
        self._keys = variables("api_key_env", [] if api_key_env is None else [api_key_env])
        self._session = requests.Session()
        self._session.mount("http://", HTTPAdapter(pool_maxsize=concurrency))
        self._session.mount("https://", HTTPAdapter(pool_maxsize=concurrency))
        # An `auth` of our own, since requests would otherwise take one from ~/.netrc.
        self._session.auth = self._authorized
        self._free = threading.BoundedSemaphore(concurrency)

    def __str__(self) -> str:
        url = self.base_url
        through = " through a proxy of the environment" if select_proxy(url, get_environ_proxies(url)) else ""
        return f"{self.model} at {url}{through}"

    def ask(self, questions: Sequence[str], seconds: float | None = None) -> list[str | NoAnswer]:
        """The answer to each question, in order, or why there is none.

        Args:
            questions: texts.
            seconds: for all of them. None: no limit.
        """
        ended = threading.Event()
        threads = ThreadPoolExecutor(min(self.concurrency, max(1, len(questions))))
        calls = [threads.submit(self._ask, question, ended) for question in questions]
        try:
            began = time.monotonic()
            limit = math.inf if seconds is None else seconds
            notice = _NOTICE
            pending = set(calls)
            while pending and (waited := time.monotonic() - began) < limit:
                if waited >= notice:
                    notice *= 2
                    message = "%d of %d questions to %s have no answer after %d s."
                    _log.warning(message, len(pending), len(calls), self, waited)
                pending = wait(pending, min(notice, limit) - waited).not_done
        finally:
            # What is in flight ends by its own time limit.
            ended.set()
            threads.shutdown(wait=False, cancel_futures=True)
        late = NoAnswer("late: the time for the batch was over")
        return [late if call in pending else call.result() for call in calls]

    def _ask(self, question: str, ended: threading.Event) -> str | NoAnswer:
        for attempt in range(self.max_retries + 1):
            # Attempts that failed together are not made together again.
            if attempt and ended.wait(random.uniform(0.5, 1.0) * min(2 ** (attempt - 1), _LONGEST_PAUSE)):
                break
            try:
                with self._free:
                    return self._attempt(question)
            except NoAnswer as error:
                failed = error
                if not error.again:
                    break
        return failed

    def _attempt(self, question: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            **self.generation_kwargs,
        }
        deadline = time.monotonic() + self.timeout
        limits = (min(_CONNECT, self.timeout), self.timeout)
        url = f"{self.base_url}/chat/completions"
        content = b""
        try:
            with self._session.post(url, json=body, timeout=limits, stream=True, allow_redirects=False) as response:
                # The limit of requests is one between two pieces, however many there are.
                while piece := response.raw.read1(1 << 16, decode_content=True):
                    content += piece
                    if time.monotonic() > deadline or len(content) > _MOST_BYTES:
                        raise NoAnswer("its answer was too slow or too long", again=True)
        except (OSError, urllib3.exceptions.HTTPError) as error:
            raise NoAnswer(self._without_keys(f"{type(error).__name__}: {error}"), again=True) from error
        status = response.status_code
        if status != 200:
            why = self._without_keys(content.decode(errors="replace"))
            raise NoAnswer(f"HTTP {status}: {why}", again=status >= 500 or status in _PASSING)
        try:
            choice = json.loads(content)["choices"][0]
            said = choice["message"]["content"] or ""
            # One that was cut off has not come to its end.
            return "" if choice.get("finish_reason") == "length" else str(said)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise NoAnswer("it answered with something else than a chat completion", again=True) from error

    def _authorized(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        for key in self._keys.values():
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    def _without_keys(self, text: str) -> str:
        return without_values(text, self._keys)[:300]
