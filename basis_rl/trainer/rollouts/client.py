"""TRL's client of a vLLM server with timeouts, weights through a folder, and a request that may be asked ahead."""

from __future__ import annotations

import copy
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch
from torch import Tensor
from trl.generation.vllm_client import VLLMClient

from basis_rl.rollout.weights import default_folder, write_weights
from basis_rl.trainer.faults import RequestRefused, RolloutError
from basis_rl.trainer.rollouts.prefetch import Ahead, AskedAhead

_AT_A_TIME = 256


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


class _Failure:
    """Stands where TRL expects a list of prompts: it is broadcast to every rank like one, and raises there."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __iter__(self) -> Iterator[Any]:
        raise as_error(self.message)


class _Sent:
    """The same, for a request whose answer comes later."""

    def __iter__(self) -> Iterator[Any]:
        raise AskedAhead


class _Session(requests.Session):
    """Every request has a timeout; nothing is tried again here, since what a failed request did is not known."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.timeout = (10.0, timeout)

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs.setdefault("timeout", self.timeout)
        return super().request(*args, **kwargs)


class Client(VLLMClient):
    """TRL's client with timeouts, and with weights through a folder where NCCL is not to be had."""

    def __init__(self, settings: SyncSettings, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.session.close()
        self.session: requests.Session = _Session(settings.request_timeout)
        self.settings = settings
        self.folder = settings.folder or default_folder(self.base_url)
        self.version = 0
        self.workers: list[str] = []
        self.ahead: Ahead | None = None
        self.asking_ahead: int | None = None  # the step, while what is asked is not to be waited for
        self.training = False  # only then may the answer to an earlier request be taken
        self.longest: int | None = None  # while a later turn is drawn: most tokens of a prompt and its completion
        self.taken: tuple[int, float] | None = None  # of the last answer: step of its request, seconds waited

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

    def init_communicator(self, device: Any = 0) -> None:
        if self.settings.transfer == "nccl":
            super().init_communicator(device)
        else:
            self.rpc("basis_retie")  # fails at once where the server lacks the extension or its development mode
        self.workers = self._identity()

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Tensor]]) -> None:
        if self._identity() != self.workers:  # to an earlier one's, NCCL would send without an end
            raise RolloutError("the vLLM server has been started anew")
        if self.settings.transfer == "nccl":
            super().update_named_params(metadata, named_params)
            return
        self.version += 1
        try:
            write_weights(self.folder, named_params)
            loaded = self.rpc("basis_reload", str(self.folder), self.version)
        finally:  # shared memory is memory
            shutil.rmtree(self.folder, ignore_errors=True)
        for done in loaded:
            assert done["version"] == self.version, f"the server has weights {done['version']}, not {self.version}"

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

    def generate(self, prompts: Any, **kwargs: Any) -> Any:
        request = {"prompts": prompts, **kwargs}
        if self.asking_ahead is not None:
            self.ahead = Ahead(request, self.asking_ahead)
            self.ahead.send(partial(VLLMClient.generate, self._apart()))  # TRL's raises
            return {"prompt_ids": _Sent(), "completion_ids": None, "logprobs": None}
        self.taken = None
        if self.ahead is not None and self.training and self.ahead.request == request:
            waited, (ahead, self.ahead) = self.ahead.wait(), (self.ahead, None)
            if ahead.answer is not None:
                self.taken = (ahead.step, waited)
                return ahead.answer
        try:
            if self.longest is not None:
                return self._generate_within(self.longest, prompts, **kwargs)
            return super().generate(prompts, **kwargs)
        except Exception as error:
            return {"prompt_ids": _Failure(describe(error)), "completion_ids": None, "logprobs": None}

    def _generate_within(self, longest: int, prompts: list[list[int]], *, max_tokens: int, **kwargs: Any) -> Any:
        """Each prompt with its own room: the server refuses what would not fit its context, and would draw for nothing
        what does not fit the completion."""

        def ask(prompt: list[int]) -> Any:
            room = min(max_tokens, longest - len(prompt))
            return VLLMClient.generate(self._apart(), [prompt], max_tokens=room, **kwargs)

        with ThreadPoolExecutor(min(_AT_A_TIME, len(prompts))) as threads:
            answers = list(threads.map(ask, prompts))
        return {
            key: None if answers[0][key] is None else [row for answer in answers for row in answer[key]]
            for key in answers[0]
        }

    def settle(self) -> float:
        """Wait for the request that is under way, whose weights must not change; drop it if it failed. Seconds."""
        waited = 0.0 if self.ahead is None else self.ahead.wait()
        if self.ahead is not None and self.ahead.answer is None:
            self.ahead = None
        return waited

    def _apart(self) -> Client:
        """The same server for another thread: a session is not shared between threads."""
        other = copy.copy(self)
        other.session = _Session(self.settings.request_timeout)
        return other

    def prompt_log_probs(self, token_ids: list[int]) -> Tensor:
        """``(L - 1,)`` log-probability of each token but the first, given those before it."""
        body = {"model": self.model, "prompt": [token_ids], "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        rows = self._post(f"{self.base_url}/v1/completions", json=body)["choices"][0]["prompt_logprobs"]
        return torch.tensor([rows[i][str(token_ids[i])]["logprob"] for i in range(1, len(token_ids))])


def as_error(message: str) -> Exception:
    """The exception for what `describe` said on the main rank: HTTP 4xx is the request's fault, unless the server was
    slow (408) or busy (429)."""
    if re.search(r"Request failed: 4(?!08|29)\d\d", message):
        return RequestRefused(f"The vLLM server refuses a request. Prompts too long for its --max-model-len? {message}")
    return RolloutError(message)


def describe(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {str(error)[:500]}"
