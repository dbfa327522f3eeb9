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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry

from basis_rl.rewards.variables import variables, without_values
from basis_rl.run.http import BoundedSession
from basis_rl.text import printable

# Seconds between two attempts, at most; they double from one second on.
_LONGEST_PAUSE = 8.0
# Seconds after which a wait is logged, then after twice as many, and so on.
_NOTICE = 30.0
# HTTP statuses besides 5xx after which the same request may succeed: too slow, conflict, too many requests.
_PASSING = (408, 409, 429)
# What reading an answer raises that is no chat completion.
_NO_COMPLETION = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_log = logging.getLogger(__name__)


class NoAnswer(str):
    """In place of an answer: why there is none."""


class _Refused(OSError):
    """Another attempt would be refused too."""


class _Limited(OSError):
    """Another attempt may be made after so many seconds, as the header Retry-After says."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds


@dataclass
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

    base_url: str
    model: str
    api_key_env: str | None
    concurrency: int
    timeout: float
    max_retries: int
    generation_kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        parts = urlsplit(str(self.base_url))
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(
                "base_url must be an address such as http://127.0.0.1:8000/v1, without a name or password in it "
                "(api_key_env names the variable with the key)."
            )
        self._key = variables("api_key_env", [] if self.api_key_env is None else [self.api_key_env])
        self._session = BoundedSession(self.concurrency)
        # An `auth` of our own, since requests would otherwise take one from ~/.netrc.
        self._session.auth = self._authorized
        self._free = threading.BoundedSemaphore(self.concurrency)

    def __str__(self) -> str:
        return f"{self.model} at {self.base_url}"

    def ask(self, questions: Sequence[str], seconds: float | None = None) -> list[str]:
        """The answer to each question, in order; a `NoAnswer` where there is none.

        Args:
            questions: texts.
            seconds: for all of them. None: no limit.
        """
        began = time.monotonic()
        limit = math.inf if seconds is None else seconds
        notice = _NOTICE
        ended = threading.Event()
        threads = ThreadPoolExecutor(min(self.concurrency, max(1, len(questions))))
        calls = [threads.submit(self._ask, question, ended) for question in questions]
        pending = set(calls)
        try:
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
        return [NoAnswer("the time for the batch was over") if call in pending else call.result() for call in calls]

    def _ask(self, question: str, ended: threading.Event) -> str:
        why = ""
        failed = 0
        pause = 0.0
        while failed <= self.max_retries and not ended.wait(pause):
            try:
                with self._free:
                    return self._attempt(question)
            except (OSError, *_NO_COMPLETION) as error:
                why = str(error)
                if isinstance(error, _Refused):
                    break
                # Attempts that failed together are not made together again.
                pause = random.uniform(0.5, 1.0) * min(2**failed, _LONGEST_PAUSE)
                if isinstance(error, _Limited):
                    # To wait as one is told is no failure; the time for the batch bounds it.
                    pause += error.seconds
                else:
                    failed += 1
        return NoAnswer(printable(without_values(why, self._key)[:300]))

    def _attempt(self, question: str) -> str:
        body = {"model": self.model, "messages": [{"role": "user", "content": question}], **self.generation_kwargs}
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        response = self._session.post(url, json=body, timeout=self.timeout)
        status = response.status_code
        if status != 200:
            why = f"HTTP {status}: {response.content.decode(errors='replace')}"
            if status < 500 and status not in _PASSING:
                raise _Refused(why)
            with suppress(KeyError, InvalidHeader):
                raise _Limited(why, Retry().parse_retry_after(response.headers["Retry-After"]))
            raise OSError(why)
        try:
            choice = json.loads(response.content)["choices"][0]
            said = choice["message"]
            answer = str(said["content"] or said.get("refusal") or "")
            # One that was cut off has not come to its end.
            return "" if choice.get("finish_reason") == "length" else answer
        except _NO_COMPLETION as error:
            why = response.content.decode(errors="replace")
            raise OSError(f"no chat completion ({type(error).__name__}): {why}") from error

    def _authorized(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        for key in self._key.values():
            request.headers["Authorization"] = f"Bearer {key}"
        return request
