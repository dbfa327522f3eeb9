"""TRL's vLLM generation with weights that are checked, time limits, and a server that may come back."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import trl.trainer.grpo_trainer
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import add_fused_lm_head

from basis_rl.engine.adapter import Following, PolicyAdapter
from basis_rl.engine.client import server_urls
from basis_rl.engine.local import in_mode
from basis_rl.engine.servers import Servers
from basis_rl.engine.training_client import Answer, TrainingClient
from basis_rl.engine.weights import SyncSettings, merged_parameters
from basis_rl.run.errors import RequestRefused, RewardFailed, RolloutError, ServerLost, StopAsked, SyncError
from basis_rl.run.seams import attributes

_PROBE = "Let x be the sum of the first ten odd numbers. What is 3 x + 17, and why is 317 prime?"
# Settings of each request, by the names of TRL's client; `_request` adds `n`, `min_p` and `max_tokens`.
_SETTINGS = (
    *("temperature", "top_p", "top_k", "repetition_penalty"),
    *("logprobs", "structured_outputs_regex", "generation_kwargs"),
)
_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Generation(VLLMGeneration):
    """`VLLMGeneration` whose every push of weights is checked, and which outlives a restart of its server.

    After each push the engine's log-probabilities of a probe are compared with those of the model that is trained:
    `sync_error`, the largest absolute difference. Failures of the main process, which alone talks to the server, travel
    to all ranks and are raised there, since the others would wait forever. After one, the trainer waits for the server,
    pushes the weights again and generates the batch again: nothing is trained on rollouts of other weights.

    With `keeps_requests` a push stops the engine for as long as weights change, and requests in flight go on with the
    new ones. `longest` bounds the tokens of a prompt and its completion together (None: `max_completion_length` alone).
    """

    interrupting: Callable[[], AbstractContextManager[None]] = nullcontext
    # Optimizer steps taken so far.
    steps_taken: Callable[[], int] = staticmethod(lambda: 0)
    # True once the supervisor stops restarting the server.
    given_up: Callable[[], bool] = staticmethod(lambda: False)
    # What is sent in place of merged weights, once it was tried that the server can serve it.
    _adapter: PolicyAdapter | None = None
    _tries_adapter = False

    def __init__(self, *args: Any, settings: SyncSettings, **kwargs: Any) -> None:
        self.settings = settings
        self.sync_error = 0.0
        self.recoveries = 0
        self.longest: int | None = None
        # Whether requests go on while weights change; the optimizer step of the weights that are served.
        self.keeps_requests = False
        self.served_step = 0
        self._weight_metadata: Any = None
        self._tries_adapter = settings.adapter
        self._following = Following()
        # TRL's constructor connects to the server, for which all of the above is needed.
        super().__init__(*args, **kwargs)
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        self.probe: list[int] = tokenizer(_PROBE, add_special_tokens=False)["input_ids"][:64]

    def _init_vllm(self) -> None:
        if self.mode != "server":
            on_cpu = self.accelerator.device.type == "cpu"
            with _small_cpu_engine(str(self.model.dtype).removeprefix("torch.")) if on_cpu else nullcontext():
                super()._init_vllm()
            return
        urls = server_urls(self.server_base_url, self.server_host, self.server_port)

        def connect() -> None:
            config = self.accelerator.unwrap_model(self.model).config.get_text_config()
            limits = {"group_port": self.group_port, "connection_timeout": self.server_timeout}
            clients = [TrainingClient(self.settings, each, config, **limits) for each in urls]
            self.vllm_client = Servers(clients) if len(clients) > 1 else clients[0]
            self.vllm_client.init_communicator(device=self.accelerator.device)

        try:
            self.by_main(connect)
        except (RolloutError, RequestRefused) as error:
            raise ValueError(f"use_vllm: {error}") from error

    def set_interrupt(self, interrupting: Callable[[], AbstractContextManager[None]]) -> None:
        """Let a signal to stop end each wait for the server: `interrupting` is a context within which it raises."""
        if self.mode == "server" and self.accelerator.is_main_process:
            self.interrupting = interrupting
            self.vllm_client.session.interrupting = interrupting

    @contextmanager
    def held(self, run: str, folder: str) -> Iterator[None]:
        """Within it the server belongs to this run.

        Args:
            run: an id that every resume of a run shares, and no other run has.
            folder: its output_dir, by which another run is told of it.

        Raises:
            ValueError: the server has the weights of another run. On every rank.
        """
        if self.mode != "server":
            yield
            return

        def take() -> None:
            client = self.vllm_client
            client.run = run
            client.owner["folder"] = folder
            with suppress(RolloutError):
                # If the server cannot be reached now, the first push waits for it. No push has the version -1.
                client.hold(-1)

        try:
            self.by_main(take)
        except RequestRefused as error:
            raise ValueError(f"use_vllm: {error}") from error
        try:
            yield
        finally:
            if self.accelerator.is_main_process:
                self.vllm_client.release()

    def sync_weights(self) -> None:
        if self.mode == "server":
            self.persist(self._push)
            return
        if self.accelerator.device.type == "cpu":
            self._reload_colocated()
        else:
            super().sync_weights()
        self._check(self._colocated_log_probs())

    def generate(
        self, prompts: list[list[int]], images: list[Any] | None, num_generations: int, profiler: Any = None
    ) -> tuple[Any, ...]:
        if self.mode != "server":
            return super().generate(prompts, images, num_generations, profiler)
        with profiler or nullcontext():
            return self.persist(partial(self._ask, prompts, images, num_generations))

    def _ask(self, prompts: list[list[int]], images: list[Any] | None, num_generations: int) -> tuple[Any, ...]:
        """What TRL's `generate` returns for this rank's rows: the main process asks for those of all ranks at once."""
        rows = gather_object(list(zip(prompts, images or [None] * len(prompts), strict=True)))

        def answer_all() -> Answer:
            return self.vllm_client.complete(*self._request(rows[::num_generations], num_generations))

        answer = self.by_main(answer_all)
        first = self.accelerator.process_index * len(prompts)
        found = (answer.get(key) for key in ("completion_ids", "logprobs", "logprob_token_ids"))
        return prompts, *(values and values[first : first + len(prompts)] for values in found)

    def sampling(self) -> dict[str, Any]:
        """How completions are drawn, by the names of TRL's client."""
        return {name: getattr(self, name) for name in _SETTINGS} | {"min_p": self.min_p or 0.0}

    def require_keeping(self) -> None:
        """From now on, weights change while requests go on.

        Raises:
            ValueError: the server cannot do that, or gives no log-probabilities. On every rank.
        """
        self.keeps_requests = True

        def try_both() -> None:
            with self.vllm_client.keeping(0):
                pass
            self.vllm_client.complete_one(self.probe, 1, self.sampling())

        try:
            self.by_main(try_both)
        except (RolloutError, RequestRefused) as error:
            raise ValueError(
                f"rollouts: stream needs a vLLM server that can pause requests while weights change: {error} Start it "
                "with `basis-rl serve MODEL`, or set rollouts to sync."
            ) from error

    def _request(self, rows: list[tuple[list[int], Any]], num_generations: int) -> tuple[Any, ...]:
        """Arguments of `TrainingClient.complete`. Of all ranks, one row for each `num_generations` completions."""
        settings = self.sampling() | {"n": num_generations, "max_tokens": self.max_completion_length}
        if self.keeps_requests:
            salt = self.vllm_client.salt
            settings["generation_kwargs"] = {**(settings["generation_kwargs"] or {}), "cache_salt": salt}
        prompts = [prompt for prompt, _ in rows]
        images = [image for _, image in rows]
        if all(image is None for image in images):
            return prompts, settings, self.longest
        features = self.vllm_client.image_features(images)
        try:
            placed = list(map(self._place_features, features, prompts))
        except ValueError as error:
            # The prompt has places for another number of images.
            raise RequestRefused(str(error)) from error
        return prompts, settings, self.longest, placed

    def persist(self, action: Callable[[], T]) -> T:
        """Run `action`; if the server fails, wait for it, push the weights and repeat, for at most `recovery_timeout`
        seconds."""
        deadline = None
        while True:
            try:
                # After a failure the server may be a new one, which has the weights that it was started with.
                if deadline is not None and action != self._push:
                    self._push()
                return action()
            except RolloutError as error:
                deadline = deadline or time.monotonic() + self.settings.recovery_timeout
                if self.accelerator.is_main_process:
                    message = "The vLLM server failed (%s). Waiting for it, %g s at most (vllm_recovery_timeout)."
                    _logger.warning(message, error, self.settings.recovery_timeout)
                self._wait_for_server(deadline, error)
                self.recoveries += 1

    def _wait_for_server(self, deadline: float, cause: RolloutError) -> None:
        if not self.by_main(partial(self._is_back, deadline)):
            late = f"did not come back within {self.settings.recovery_timeout:g} s"
            gone = "was given up after several restarts" if self.given_up() else late
            raise ServerLost(
                f"The vLLM server {gone} ({cause}). Start it again and resume with resume_from_checkpoint: auto."
            )

    def _is_back(self, deadline: float) -> bool:
        while time.monotonic() < deadline and not self.given_up():
            with self.interrupting():
                time.sleep(1.0)
            try:
                self.vllm_client.check_server(total_timeout=0.0)
                self.vllm_client.greet()
                if self.keeps_requests:
                    self.vllm_client.go_on()
                # /health may answer although the engine is dead.
                self.vllm_client.prompt_log_probs(self.probe)
                self.vllm_client.close_communicator()
                self.vllm_client.init_communicator(device=self.accelerator.device)
                return True
            except RequestRefused:
                raise
            except Exception as error:
                _logger.info("Still waiting: %r", error)
        return False

    def _push(self) -> None:
        if self._tries_adapter:
            self._try_adapter()
        if self._weight_metadata is None and self.settings.transfer == "nccl":
            # The server must know names, types and shapes before NCCL sends anything.
            self._weight_metadata = [
                (name, str(parameter.dtype).removeprefix("torch."), list(parameter.shape))
                for name, parameter in self._iter_named_params()
            ]
        parameters = self._iter_named_params()
        if not self.accelerator.is_main_process:
            deque(parameters, maxlen=0)
        self._check(self.by_main(partial(self._sent, parameters)))

    def _try_adapter(self) -> None:
        """Find out whether the adapter alone can be sent; if not, one line says why, and merged weights are sent."""
        model = self.accelerator.unwrap_model(self.model)
        adapter = PolicyAdapter(model, self._dist.gather_params, self.accelerator.device)
        reason = adapter.unsupported() or self.by_main(
            lambda: self.vllm_client.adapters.unsupported(adapter.config(), adapter.shapes(), self.probe)
        )
        self._tries_adapter = False
        if reason is None:
            self._adapter = adapter
        elif self.accelerator.is_main_process:
            _logger.warning("vllm_lora_sync: adapter: merged weights are sent in its place: %s", reason)

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """TRL's; those of a PEFT model are merged, or the adapter's, if only that is sent."""
        if self._adapter is not None:
            return self._adapter.tensors()
        if not is_peft_model(self.model):
            return super()._iter_named_params()
        return merged_parameters(self.model, self._dist.gather_params, self.accelerator.device)

    def _sent(self, parameters: Iterator[tuple[str, Tensor]]) -> Tensor:
        """Send the weights; returns the probe's log-probabilities under them."""
        client = self.vllm_client
        try:
            if self._adapter is not None:
                client.adapters.send(self._adapter.config(), dict(parameters))
            else:
                with client.keeping(self.steps_taken()) if self.keeps_requests else nullcontext():
                    # Requests that come from now on are answered by these weights.
                    self.served_step = self.steps_taken()
                    client.update_named_params(self._weight_metadata, parameters)
        finally:
            # Collective: exhaust the iterator, also after a failure, or the other ranks hang.
            deque(parameters, maxlen=0)
        client.reset_prefix_cache()
        served = client.prompt_log_probs(self.probe)
        client.probed = (self.probe, served)
        return served

    def _check(self, served: Tensor) -> None:
        """Compare a probe's log-probabilities by the engine with the trained model's."""
        trained = self._trained_log_probs()
        behind = 1.0 - self._following.share(served, trained)
        found = torch.tensor([[float((served - trained).abs().max()), behind]], device=self.accelerator.device)
        self.sync_error, behind = self.accelerator.gather(found).amax(0).tolist()
        if not self.sync_error <= self.settings.tolerance:
            raise SyncError(
                f"After the weights were sent, the vLLM engine's log-probabilities are {self.sync_error:.3g} off those "
                f"of the trained model; the bound is {self.settings.tolerance:g} (vllm_sync_tolerance). It would "
                "sample from another policy. Start the server with `basis-rl serve`, with the same model in the same "
                "precision."
            )
        if behind > 0.5:
            raise SyncError(
                "The trained model's log-probabilities of a probe have changed, but the vLLM engine's followed only "
                f"{1.0 - behind:.0%} of the way: it still serves an older policy. Restart the server, and resume with "
                "resume_from_checkpoint: auto."
            )

    @torch.no_grad()
    def _trained_log_probs(self) -> Tensor:
        """``(L - 1,)`` of the probe, on every rank: a forward pass is collective where parameters are sharded.

        The pass uses the fused head (at temperature 1), like every pass that training scores. ZeRO-3 records the order
        in which passes use parameters, and prefetches by it: after a pass that calls the head as a module, it would
        prefetch the weight of an untied head for passes that never use it, and fail.
        """
        ids = torch.tensor([self.probe], device=self.accelerator.device)
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if is_peft_model(model) else model
        # `add_fused_lm_head` replaces the model's forward; the context restores it.
        restored = attributes(model, forward=model.forward)
        with restored, self.accelerator.autocast(), in_mode(self.model, training=False):
            add_fused_lm_head(model, cast_lm_head_to_fp32=self.settings.fp32_head)
            found = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        for module in self.model.modules():
            # After a pass without a backward, FSDP2 leaves outer modules gathered.
            if isinstance(module, FSDPModule):
                module.reshard()
        return found.log_probs[0].float().cpu()

    def _reload_colocated(self) -> None:
        """The CPU engine repacks weights when it loads them, which `load_weights` alone does not undo."""
        from basis_rl.engine.worker import WeightSync

        worker = self.llm.llm_engine.model_executor.driver_worker
        worker = getattr(worker, "worker", worker)
        copies = ((name, parameter.detach().clone()) for name, parameter in self._iter_named_params())
        worker.reload_weights(weights_iterator=copies)
        WeightSync.basis_retie(worker)
        self.llm.reset_prefix_cache()

    def _colocated_log_probs(self) -> Tensor:
        from basis_rl.engine.worker import prompt_log_probs

        # TRL wakes the cache only when it generates.
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        return prompt_log_probs(self.llm, self.probe)

    def by_main(self, action: Callable[[], T]) -> T:
        """What `action` returns on the main process, on every rank; what it raises there is raised on every rank."""
        message: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                message = [action()]
            except (RequestRefused, RewardFailed, RolloutError, StopAsked) as error:
                message = [error]
            except Exception as error:
                message = [RolloutError(f"{type(error).__name__}: {str(error)[:500]}")]
        broadcast_object_list(message, from_process=0)
        if isinstance(message[0], (Exception, StopAsked)):
            raise message[0]
        return message[0]


def _small_cpu_engine(dtype: str) -> AbstractContextManager[None]:
    """Within it TRL builds its engine without compilation, in the trained model's precision, and with a small cache."""
    size = int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) << 30
    small = partial(vllm_generation.LLM, enforce_eager=True, dtype=dtype, kv_cache_memory_bytes=size)
    return attributes(vllm_generation, LLM=small)


def checked_generation(settings: SyncSettings) -> AbstractContextManager[None]:
    """Within it, TRL's trainer builds a `Generation` where it would build a `VLLMGeneration`."""
    return attributes(trl.trainer.grpo_trainer, VLLMGeneration=partial(Generation, settings=settings))
