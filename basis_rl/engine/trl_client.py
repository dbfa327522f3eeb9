"""TRL's client of a vLLM server with timeouts, and with weights through a folder where there is no NCCL."""

from __future__ import annotations

import copy
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from torch import Tensor
from trl.generation.vllm_client import VLLMClient

from basis_rl.engine.weights import default_folder, write_weights
from basis_rl.run.errors import RequestRefused, RolloutError, StopAsked

_AT_A_TIME = 256
_logger = logging.getLogger(__name__)
Answer = dict[str, Any]


@dataclass(frozen=True)
class SyncSettings:
    """How weights get to the engine, and what counts as having got there.

    Attributes:
        transfer: ``nccl`` (TRL's) or ``folder``.
        folder: None is a place in this machine's shared memory.
        tolerance: bound on ``rollout/sync_error``.
        request_timeout: seconds that one request may take.
        recovery_timeout: seconds that a server that failed is waited for.
        fp32_head: the trained model's head is kept in float32.
    """

    transfer: str
    folder: Path | None
    tolerance: float
    request_timeout: float
    recovery_timeout: float
    fp32_head: bool


@dataclass(frozen=True)
class Request:
    """What all ranks together ask a server for.

    Attributes:
        prompts: token ids of P prompts, each of which gets ``settings["n"]`` completions.
        settings: the other arguments of TRL's `VLLMClient.generate`: how completions are drawn.
        longest: most tokens of a prompt and its completion together; None where ``max_tokens`` alone is the bound.
        features: P processed images, as `VLLMClient.image_features` returns them; None without images.
    """

    prompts: list[list[int]]
    settings: dict[str, Any]
    longest: int | None = None
    features: list[dict[str, Any] | None] | None = None


class Ahead:
    """A request whose answer is not waited for yet.

    Attributes:
        request: what was asked; only the same request may have the answer.
        step: optimizer steps taken when it was asked.
        answer: None until it is there, and if the request failed.
    """

    def __init__(self, request: Request, step: int, answer: Answer | None = None) -> None:
        self.request, self.step, self.answer = request, step, answer
        self.thread: threading.Thread | None = None

    def send(self, client: Client) -> None:
        """Ask in a thread of its own, which does not keep the process from ending."""

        def work() -> None:
            try:
                self.answer = client.ask(self.request)
            except Exception as error:  # the server is gone, say
                _logger.warning("The next batch could not be generated ahead (%s); it is asked for again.", error)

        self.thread = threading.Thread(target=work, name="prefetch", daemon=True)
        self.thread.start()

    def wait(self) -> float:
        """Until the answer is there or has failed; seconds waited."""
        start = time.monotonic()
        if self.thread is not None:
            self.thread.join()
        return time.monotonic() - start

    @property
    def done(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class _Session(requests.Session):
    """Every request has a timeout; nothing is tried again here, since what a failed request did is not known.

    Attributes:
        interrupting: a context within which a signal to stop ends the wait for an answer.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.timeout = (10.0, timeout)
        self.interrupting: Callable[[], AbstractContextManager[None]] = nullcontext

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs.setdefault("timeout", self.timeout)
        with self.interrupting():
            return super().request(*args, **kwargs)


class Client(VLLMClient):
    """TRL's client with timeouts, and with weights through a folder where NCCL is not to be had."""

    interrupting: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, settings: SyncSettings, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.session.close()
        self.session: _Session = _Session(settings.request_timeout)
        self.settings = settings
        self.folder = settings.folder or default_folder(self.base_url)
        self.version = 0
        self.workers: list[str] = []

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """As in TRL, but a server that hangs does not hang us."""
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                if requests.get(f"{self.base_url}/health", timeout=5.0).status_code == 200:
                    return
            except requests.exceptions.RequestException:
                pass
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"There is no vLLM server at {self.base_url} (waited {total_timeout:g} s). Start one with "
                    "`basis-rl serve MODEL`."
                )
            time.sleep(retry_interval)

    def hear(self, interrupting: Callable[[], AbstractContextManager[None]]) -> None:
        """Let a signal to stop end each wait for an answer: `interrupting` is a context within which it raises."""
        self.interrupting = self.session.interrupting = interrupting

    def init_communicator(self, device: Any = 0) -> None:
        if self.settings.transfer == "nccl":
            super().init_communicator(device)
        else:
            self.rpc("basis_retie")  # fails at once where the server lacks the extension or its development mode
        self.workers = self._identity()

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Tensor]]) -> None:
        if self._identity() != self.workers:  # to an earlier one's, NCCL would send without an end
            raise RolloutError("the vLLM server has been restarted")
        if self.settings.transfer == "nccl":
            self.session.interrupting = nullcontext
            try:  # a server that is left alone in a collective never comes out of it
                super().update_named_params(metadata, named_params)
            finally:
                self.session.interrupting = self.interrupting
            return
        self.version += 1
        try:
            write_weights(self.folder, named_params)
            loaded = self.rpc("basis_reload", str(self.folder), self.version)
        finally:  # shared memory is memory
            shutil.rmtree(self.folder, ignore_errors=True)
        for done in loaded:
            if done["version"] != self.version:
                raise RolloutError(f"the vLLM server has weights {done['version']}, not {self.version}")

    def _identity(self) -> list[str]:
        """Of the server's workers; nothing where a server has not our extension, which NCCL can do without."""
        try:
            return self.rpc("basis_identity")
        except RolloutError:
            return []

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """What each worker returns from `method`."""
        body = {"method": method, "args": list(args), "timeout": self.settings.request_timeout}
        try:
            found: list[Any] = self._post(f"{self.base_url}/collective_rpc", json=body)["results"]
        except Exception as error:
            if re.search(r"Request failed: 404|has no attribute|not implemented", str(error), re.IGNORECASE):
                raise RolloutError(
                    f"The vLLM server at {self.base_url} does not know '{method}'. Start it with "
                    "`basis-rl serve MODEL`."
                ) from error
            raise
        return found

    def ask(self, request: Request) -> Answer:
        """The server's answer, as TRL's `generate` returns it, from any thread.

        With `longest` each prompt is asked for with its own room: the server refuses what would not fit its context,
        and would draw for nothing what does not fit the completion.
        """
        if request.longest is None:
            return self._apart().generate(request.prompts, request.features, **request.settings)
        longest, settings = request.longest, request.settings

        def ask(prompt: list[int]) -> Answer:
            room = min(settings["max_tokens"], longest - len(prompt))
            return self._apart().generate([prompt], **{**settings, "max_tokens": room})

        with ThreadPoolExecutor(min(_AT_A_TIME, len(request.prompts))) as threads:
            answers = list(threads.map(ask, request.prompts))
        return {
            key: None if answers[0][key] is None else [row for answer in answers for row in answer[key]]
            for key in answers[0]
        }

    def _apart(self) -> Client:
        """The same server for another thread: a session is not shared between threads."""
        other = copy.copy(self)
        other.session = _Session(self.settings.request_timeout)
        other.session.interrupting = self.interrupting
        return other

    def prompt_log_probs(self, token_ids: list[int]) -> Tensor:
        """``(L - 1,)`` log-probability of each token but the first, given those before it."""
        body = {"model": self.model, "prompt": [token_ids], "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        rows = self._post(f"{self.base_url}/v1/completions", json=body)["choices"][0]["prompt_logprobs"]
        return torch.tensor([rows[i][str(token_ids[i])]["logprob"] for i in range(1, len(token_ids))])


def as_error(error: Exception | StopAsked) -> RequestRefused | RolloutError | StopAsked:
    """What is raised on every rank for an error of the main one: HTTP 4xx is the request's fault, unless the server was
    slow (408) or busy (429)."""
    if isinstance(error, RequestRefused | RolloutError | StopAsked):
        return error
    message = describe(error)
    if re.search(r"Request failed: 4(?!08|29)\d\d", message):
        return RequestRefused(f"The vLLM server refuses a request. Prompts too long for its --max-model-len? {message}")
    return RolloutError(message)


def describe(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {str(error)[:500]}"
