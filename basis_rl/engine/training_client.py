"""TRL's client of one vLLM server, on top of ours: who holds the server, which weights it has, completions."""

from __future__ import annotations

import logging
import os
import re
import reprlib
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl.generation.vllm_client import VLLMClient

from basis_rl.engine.adapter import ServedAdapters, lora_missing
from basis_rl.engine.client import Client, Session, checked_choices
from basis_rl.engine.servers import joined
from basis_rl.engine.weights import SyncSettings, folder_for, sizes_of, write_weights
from basis_rl.run.errors import RequestRefused, RolloutError, WrongAnswer
from basis_rl.run.seams import attributes

# Seconds, at most, that an answer takes from the server to its thread.
_ON_ITS_WAY = 0.1
# Requests in flight.
_AT_A_TIME = 256
# Seconds that a run may spend at its end to tell the server that it is free.
_FAREWELL = 5.0
_logger = logging.getLogger(__name__)
Answer = dict[str, Any]


class UnknownMethod(WrongAnswer):
    """The server's workers do not have our extension, or the server is not in its development mode."""


class TrainingClient(VLLMClient):
    """TRL's client on top of ours: every request has a time limit, and where there is no NCCL the weights go through a
    folder.

    Args:
        settings: how weights get to the server.
        base_url: of the server.
        config: the trained model's text configuration, by which a server with another model is refused; None: no such
            check.
        kwargs: further arguments of TRL's client.
    """

    # Until it was warned that there is none.
    _expects_progress = True

    def __init__(self, settings: SyncSettings, base_url: str, config: Any = None, **kwargs: Any) -> None:
        self.settings = settings
        self.sizes = sizes_of(config)
        self.server = Client(base_url, settings.request_timeout)
        super().__init__(base_url=self.server.url, **kwargs)
        # TRL's session has no time limits and repeats requests, whatever they have done.
        self.session.close()
        self.session: Session = self.server.session
        self.folder = folder_for(self.base_url, settings.folder)
        self.version = 0
        # An id per worker, new with each start of the server. Empty if the server lacks our extension, which NCCL does
        # not need.
        self.starts: list[str] = []
        self.run = uuid.uuid4().hex
        self.owner: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "folder": os.getcwd()}
        # By request: the optimizer step of weights that came while it ran, and how many tokens it had by then.
        self.switches: dict[str, list[tuple[int, int]]] = {}
        self.served_step = 0
        self.adapters = ServedAdapters(self)
        # Token ids and their log-probabilities after the last push.
        self.probed: tuple[list[int], Tensor] | None = None

    def _get(self, url: str) -> Any:
        return self.server.ask(url.removeprefix(self.base_url))

    def _post(self, url: str, json: dict[str, Any] | None = None) -> Any:
        body = json or {}
        answer = self.server.ask(url.removeprefix(self.base_url), body)
        if url.endswith(("/v1/completions", "/inference/v1/generate")):
            # TRL uses an answer without checking it.
            return {"choices": checked_choices(self.base_url, body, answer, self.sizes["vocab_size"])}
        return answer

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """As in TRL, but a server that hangs does not hang us."""
        deadline = time.monotonic() + total_timeout
        if total_timeout and not self.server.is_healthy(5.0):
            message = "No vLLM server answers at %s. Waiting for it, %g s at most (vllm_server_timeout)."
            _logger.warning(message, self.base_url, total_timeout)
        while not self.server.is_healthy(5.0):
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"There is no vLLM server at {self.base_url} (waited {total_timeout:g} s). Start one with "
                    "`basis-rl serve MODEL`."
                )
            time.sleep(retry_interval)

    def greet(self) -> None:
        """Check that this is the right server, before anything is sent to it.

        Raises:
            WrongAnswer: it lacks our extension, has a model of other sizes, cannot load adapters that it would get, or
                does not see the folder for weights.
        """
        self.model = self.server.model().names[0]
        self.starts = self._checked_starts()
        if self.settings.adapter and (missing := lora_missing(self.server)):
            raise WrongAnswer(missing)

    def init_communicator(self, device: Any = 0) -> None:
        self.greet()
        if self.settings.transfer == "nccl":
            super().init_communicator(device)

    def _checked_starts(self) -> list[str]:
        in_folder = self.settings.transfer == "folder" or self.settings.adapter
        # If the workers find this file, they see the folder through which weights will come.
        token = self.folder.with_name(f".{uuid.uuid4().hex}")
        try:
            if in_folder:
                token.parent.mkdir(parents=True, exist_ok=True)
                token.touch()
            states = self.rpc("basis_state", str(token))
        except UnknownMethod:
            if in_folder:
                raise
            return []
        finally:
            token.unlink(missing_ok=True)
        for state in states:
            for name, size in self.sizes.items():
                if size is not None and state["model"][name] not in (size, None):
                    raise WrongAnswer(
                        f"The vLLM server at {self.base_url} serves another model than the one that is trained: its "
                        f"{name} is {state['model'][name]}, not {size}. Start it with the model that is trained."
                    )
            if in_folder and not state["sees"]:
                raise WrongAnswer(
                    f"The vLLM server at {self.base_url} does not see the folder {self.folder.parent}, through which "
                    "it would get the weights: it runs on another machine, or in a container. Set vllm_sync_folder to "
                    "a folder that both see (a network file system), or vllm_weight_sync: nccl if both have GPUs "
                    "(with vllm_lora_sync: merged)."
                )
        return [state["start"] for state in states]

    def hold(self, version: int, *, merged: bool = False) -> None:
        """Tell the server's workers that weights of this run come next; `merged`: in place of the base model's.

        Raises:
            WrongAnswer: they have those of another run, whose process still runs as far as this machine can tell.
            RolloutError: the server has been restarted.
        """
        if not self.starts:
            return
        states = self.rpc("basis_hold", self.run, self.owner, version, None, merged)
        # A run that was killed could not release the server.
        gone = [state["run"] for state in states if state["run"] != self.run and _has_ended(state["owner"])]
        if gone:
            states = self.rpc("basis_hold", self.run, self.owner, version, gone[0], merged)
            self.go_on()
        self._require(states, version)

    def release(self) -> None:
        """Free the server for other runs. A server that is gone, or that another run has by now, is left alone."""
        if self.starts:
            body = {"method": "basis_hold", "args": [self.run, None, self.version], "timeout": _FAREWELL}
            # A new session: the run may end because of a signal, and a signal interrupts every wait of this session.
            farewell = Client(self.base_url, _FAREWELL)
            with suppress(RolloutError, RequestRefused), attributes(self, session=farewell.session):
                self.adapters.drop(0)
                farewell.ask("/collective_rpc", body)

    def prove(self) -> None:
        """Make sure that the server has the weights that were sent last, by what it says or by the last probe.

        Raises:
            WrongAnswer: it has those of another run.
            RolloutError: it was restarted, or has others for another reason.
        """
        if self.starts:
            self._require(self.rpc("basis_state"), self.version)
        elif self.probed is not None:
            ids, before = self.probed
            off = float((self.prompt_log_probs(ids) - before).abs().max())
            if not off <= self.settings.tolerance:
                raise RolloutError(f"the vLLM server has other weights than those sent last: a probe is {off:.3g} off")

    def _require(self, states: list[Any], version: int) -> None:
        if [state["start"] for state in states] != self.starts:
            # NCCL would wait forever for the workers from before the restart.
            raise RolloutError("the vLLM server has been restarted")
        for state in states:
            owner = state["owner"]
            if owner is not None and state["run"] != self.run:
                raise WrongAnswer(
                    f"The vLLM server at {self.base_url} has the weights of another run: '{owner['folder']}', process "
                    f"{owner['pid']} on {owner['host']}. Two runs cannot share a server: wait for that run, end it, or "
                    "start another server. If it was killed without releasing the server, restart the server, and "
                    "this run gets it."
                )
            if (state["run"], state["version"]) != (self.run, version):
                raise RolloutError(f"the vLLM server has weights {state['version']}, not {version}")

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Tensor]]) -> None:
        self.version += 1
        self.hold(self.version, merged=True)
        if self.settings.transfer == "nccl":
            # If this side left the collective, the server would wait in it forever, so no signal may interrupt it.
            with attributes(self.session, interrupting=nullcontext):
                super().update_named_params(metadata, named_params)
            return
        try:
            write_weights(self.folder, named_params)
            self.load()
        finally:
            # A folder in shared memory takes up memory until it is removed.
            shutil.rmtree(self.folder, ignore_errors=True)

    def load(self) -> None:
        """Let the server load the weights that are in the folder."""
        self.rpc("basis_reload", str(self.folder))

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """What each worker returns from `method`."""
        body = {"method": method, "args": list(args), "timeout": self.settings.request_timeout}
        try:
            answer = self.server.ask("/collective_rpc", body)
        except (RolloutError, RequestRefused) as error:
            if re.search(r"\(HTTP 404\)|has no attribute|not implemented", str(error), re.IGNORECASE):
                raise UnknownMethod(
                    f"The vLLM server at {self.base_url} does not know '{method}'. Start it with "
                    "`basis-rl serve MODEL` of this version."
                ) from error
            raise
        found = answer.get("results") if isinstance(answer, dict) else None
        if not (isinstance(found, list) and found and all(isinstance(each, dict) for each in found)):
            raise WrongAnswer(
                f"The vLLM server at {self.base_url} answered with results {reprlib.repr(found)[:80]} of '{method}'; "
                "expected was a dictionary of each worker."
            )
        return found

    @property
    def salt(self) -> str:
        """Requests of different salts share no cached tokens, which other weights may have made."""
        return f"{self.run}:{self.version}"

    @contextmanager
    def keeping(self, step: int) -> Iterator[None]:
        """Within it the engine stands still; requests in flight go on afterwards, with the weights of `step`."""
        self.server.ask("/pause?mode=keep", {})
        try:
            self.served_step = step
            if (counts := self._progress()) is not None:
                # What has ended is no longer among them, and on its way to us.
                time.sleep(_ON_ITS_WAY)
                for name, known in dict(self.switches).items():
                    # What is not among them now has not begun.
                    known.append((step, counts.get(name, 0)))
            yield
        finally:
            self.go_on()

    def _progress(self) -> dict[str, int] | None:
        """How many tokens are drawn of requests in flight, by our names; None if some workers do not say so."""
        with suppress(UnknownMethod):
            found = self.rpc("basis_progress")
            # With --data-parallel-size the workers of one replica answer.
            if len(found) >= self.get_world_size():
                # vLLM puts its own letters around our name, with hyphens between them.
                return {name.split("-")[1]: n for each in found for name, n in each.items()}
        if self._expects_progress:
            _logger.warning(
                "The vLLM server at %s does not say how far its requests are when new weights come (vLLM's model "
                "runner V2, or --data-parallel-size above 1). rollout/staleness and rollout/staleness_max are upper "
                "bounds: all tokens of an answer count as drawn by the weights with which it began.",
                self.base_url,
            )
            self._expects_progress = False
        return None

    def go_on(self) -> None:
        """Let requests go on: also after a push that a signal, a failure or a kill has ended while the engine stood
        still. If the server has failed, something else says so."""
        with suppress(RolloutError, RequestRefused):
            # In a new session: after a signal every request of this one raises.
            Client(self.base_url).ask("/resume", {})

    def complete_one(self, prompt: list[int], most: int, settings: Mapping[str, Any]) -> Answer:
        """One completion, from any thread; that the weights were the right ones is left to `prove`.

        Args:
            prompt: token ids.
            most: tokens of the completion.
            settings: as in `complete`.

        Returns:
            ``completion_ids``, ``logprobs`` and ``steps``: of each token its id, its log-probability by the policy that
            drew it, and the optimizer step of that policy.
        """
        name = uuid.uuid4().hex
        own = {**(settings["generation_kwargs"] or {}), "request_id": name, "cache_salt": self.salt}
        self.switches[name] = []
        # Only now: weights that come after this are among its switches.
        step = self.served_step
        try:
            answer = self.generate([prompt], **{**settings, "n": 1, "max_tokens": most, "generation_kwargs": own})
        finally:
            switches = self.switches.pop(name)
        ids = answer["completion_ids"][0]
        steps = [step] * len(ids)
        for later, tokens in switches:
            steps[tokens:] = [later] * len(ids[tokens:])
        return {"completion_ids": ids, "logprobs": [each[0] for each in answer["logprobs"][0]], "steps": steps}

    def complete(
        self,
        prompts: list[list[int]],
        settings: dict[str, Any],
        longest: int | None = None,
        features: list[dict[str, Any] | None] | None = None,
    ) -> Answer:
        """The server's answer, as TRL's `generate` returns it, from any thread.

        With `longest` each prompt is a request of its own, with as many tokens as are left for it: the server refuses
        requests that exceed its context, and would generate tokens beyond the limit in vain.

        Args:
            prompts: token ids of P prompts, each of which gets ``settings["n"]`` completions.
            settings: the other arguments of TRL's `VLLMClient.generate`: how completions are drawn.
            longest: most tokens of a prompt and its completion; None where ``max_tokens`` alone is the bound.
            features: P processed images, as `VLLMClient.image_features` returns them; None without images.
        """

        def ask(prompt: list[int], room: int) -> Answer:
            return self.generate([prompt], **{**settings, "max_tokens": room})

        try:
            if longest is None:
                answer = self.generate(prompts, features, **settings)
            else:
                rooms = [min(settings["max_tokens"], longest - len(prompt)) for prompt in prompts]
                # TRL's `generate` has one limit for all prompts of a request.
                with ThreadPoolExecutor(min(_AT_A_TIME, len(rooms))) as threads:
                    answer = joined(list(threads.map(ask, prompts, rooms)))
        except RequestRefused as error:
            # Another server at this address has a model of another name and refuses ours; `prove` then says what
            # happened.
            self.prove()
            if "(HTTP 400)" in str(error):
                raise RequestRefused(f"{error} Is a prompt too long for its --max-model-len?") from error
            raise
        self.prove()
        return answer

    def prompt_log_probs(self, token_ids: list[int]) -> Tensor:
        """``(L - 1,)`` log-probability of each token but the first, given those before it."""
        body = {"model": self.model, "prompt": [token_ids], "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        answer = self.server.ask("/v1/completions", body)
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            return torch.tensor([float(rows[i][str(token_ids[i])]["logprob"]) for i in range(1, len(token_ids))])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise WrongAnswer(
                f"The vLLM server at {self.base_url} answered a probe without choices[0].prompt_logprobs of its "
                f"{len(token_ids)} token ids ({error!r}). Start it with `basis-rl serve MODEL`."
            ) from error


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this machine that has ended, or is this process, with an earlier trainer."""
    if owner["host"] != socket.gethostname() or not Path("/proc/self").exists():
        return False
    return owner["pid"] == os.getpid() or not Path(f"/proc/{owner['pid']}").exists()
