"""TRL's vLLM generation with weights that are checked, timeouts, and a server that may come back."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import trl.trainer.grpo_trainer
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import add_fused_lm_head

from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.faults import RolloutError, ServerLost, SyncError
from basis_rl.trainer.rollouts.client import Client, SyncSettings, as_error, describe
from basis_rl.trainer.rollouts.prefetch import AskedAhead

_PROBE = "Let x be the sum of the first ten odd numbers. What is 3 x + 17, and why is 317 prime?"
_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Generation(VLLMGeneration):
    """`VLLMGeneration` whose every push of weights is checked, and which outlives a restart of its server.

    After each push the engine's log-probabilities of a probe are compared with those of the model that is trained:
    `sync_error`, the largest absolute difference. Failures travel to all ranks before they are raised, since the ranks
    that are not asked would wait for ever. After one, the server is waited for, the weights are pushed again and the
    batch is generated anew: nothing is trained on samples of other weights.
    """

    def __init__(self, *args: Any, settings: SyncSettings, **kwargs: Any) -> None:
        self.settings = settings
        self.sync_error = 0.0
        self.recoveries = 0
        self._waited = 0.0
        self._weight_metadata: Any = None
        super().__init__(*args, **kwargs)
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        self.probe: list[int] = tokenizer(_PROBE, add_special_tokens=False)["input_ids"][:64]

    def _init_vllm(self) -> None:
        if self.mode != "server":
            on_cpu = self.accelerator.device.type == "cpu"
            with _small_cpu_engine(str(self.model.dtype).removeprefix("torch.")) if on_cpu else nullcontext():
                super()._init_vllm()
            return
        problem = None
        if self.accelerator.is_main_process:
            try:
                url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
                self.vllm_client = Client(
                    self.settings, base_url=url, group_port=self.group_port, connection_timeout=self.server_timeout
                )
                self.vllm_client.init_communicator(device=self.accelerator.device)
            except Exception as error:
                problem = describe(error)
        problem = self._told_by_main(problem)
        if problem is not None:
            raise ValueError(f"use_vllm: {problem}")

    def sync_weights(self) -> None:
        if self.mode == "server":
            self._persist(self._push)
        elif self.accelerator.device.type == "cpu":
            self._reload_colocated()
            self._check(self._colocated_log_probs())
        else:
            super().sync_weights()
            self._check(self._colocated_log_probs())

    def generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if self.mode != "server":
            result: tuple[Any, ...] = super().generate(*args, **kwargs)
            return result
        if self.accelerator.is_main_process:
            self.vllm_client.training = self.model.training
        return self._persist(partial(super().generate, *args, **kwargs))

    def ask_ahead(self, prompts: list[list[int]], num_generations: int, step: int) -> None:
        """Ask the server for these ranks' completions and go on; the same `generate` in training has the answer.

        Args:
            prompts: this rank's rows, as for `generate`.
            num_generations: G.
            step: optimizer steps taken.
        """
        if self.accelerator.is_main_process:
            self.vllm_client.asking_ahead = step
        try:
            super().generate(prompts, None, num_generations)
        except AskedAhead:
            pass
        finally:
            if self.accelerator.is_main_process:
                self.vllm_client.asking_ahead = None

    def last_taken(self) -> tuple[int | None, float]:
        """Of the last batch, on the main process: the step at which it was asked for ahead (None: it was not), and the
        seconds that it was waited for."""
        waited, self._waited = self._waited, 0.0
        taken = self.vllm_client.taken
        return (None, waited) if taken is None else (taken[0], waited + taken[1])

    def _persist(self, action: Callable[[], T]) -> T:
        """Do it; if the server fails, wait for it, push the weights and do it again, until the time is over."""
        deadline = None
        while True:
            try:
                if deadline is not None and action != self._push:
                    self._push()
                return action()
            except RolloutError as error:
                deadline = deadline or time.monotonic() + self.settings.recovery_timeout
                if self.accelerator.is_main_process:
                    _logger.warning("The vLLM server failed (%s). Waiting for it.", error)
                self._wait_for_server(deadline, error)
                self.recoveries += 1

    def _wait_for_server(self, deadline: float, cause: RolloutError) -> None:
        back = None
        if self.accelerator.is_main_process:
            back = False
            while not back and time.monotonic() < deadline:
                time.sleep(1.0)
                try:
                    self.vllm_client.check_server(total_timeout=0.0)
                    self.vllm_client.prompt_log_probs(self.probe)  # /health answers although the engine is dead
                    self.vllm_client.close_communicator()
                    self.vllm_client.init_communicator(device=self.accelerator.device)
                    back = True
                except Exception as error:
                    _logger.info("Still waiting: %s", describe(error))
        if not self._told_by_main(back):
            raise ServerLost(
                f"The vLLM server did not come back within {self.settings.recovery_timeout:g} s ({cause}). Start it "
                "again and go on with resume_from_checkpoint: auto."
            )

    def _push(self) -> None:
        if self.accelerator.is_main_process:
            self._waited += self.vllm_client.settle()  # what is under way has been promised the old weights
        if self._weight_metadata is None and self.settings.transfer == "nccl":
            self._weight_metadata = [
                (name, str(parameter.dtype).removeprefix("torch."), list(parameter.shape))
                for name, parameter in self._iter_named_params()
            ]
        parameters, problem, served = self._iter_named_params(), None, None
        if self.accelerator.is_main_process:
            try:
                self.vllm_client.update_named_params(self._weight_metadata, parameters)
            except Exception as error:
                problem = describe(error)
        for _ in parameters:  # gathering shards is collective: who stopped early walks to the end with the others
            pass
        if self.accelerator.is_main_process and problem is None:
            try:
                self.vllm_client.reset_prefix_cache()
                served = self.vllm_client.prompt_log_probs(self.probe)
            except Exception as error:
                problem = describe(error)
        problem = self._told_by_main(problem)
        if problem is not None:
            raise as_error(problem)
        self._check(served)

    def _check(self, served: Tensor | None) -> None:
        """Compare a probe's log-probabilities, given where this rank asked the engine, with the trained model's."""
        own = self._trained_log_probs()
        error = torch.zeros(1) if served is None else (served - own).abs().max()[None]
        self.sync_error = float(self.accelerator.gather(error.to(self.accelerator.device)).max())
        if not self.sync_error <= self.settings.tolerance:
            raise SyncError(
                f"After the weights were sent, the vLLM engine's log-probabilities are {self.sync_error:.3g} off those "
                f"of the trained model; the bound is {self.settings.tolerance:g} (vllm_sync_tolerance). It would "
                "sample from another policy. Is it the same model, in the same precision, started with "
                "`basis-rl serve`?"
            )

    @torch.no_grad()
    def _trained_log_probs(self) -> Tensor:
        """``(L - 1,)`` of the probe, on every rank: a forward pass is collective where parameters are sharded.

        By a fused head (at temperature 1), as all that training scores. ZeRO-3 remembers the order in which passes use
        parameters, and fetches them ahead: after a pass by another way, in which the head is a module of its own, it
        would fetch that of an untied head, wait for nobody to use it, and fail.
        """
        ids = torch.tensor([self.probe], device=self.accelerator.device)
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if is_peft_model(model) else model
        forward, training = model.forward, self.model.training
        add_fused_lm_head(model, cast_lm_head_to_fp32=self.settings.fp32_head)
        self.model.eval()
        try:
            with self.accelerator.autocast():
                found = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        finally:
            model.forward = forward
            self.model.train(training)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # outer ones stay gathered after a pass without a backward
                module.reshard()
        log_probs: Tensor = found.log_probs[0].float().cpu()
        return log_probs

    def _reload_colocated(self) -> None:
        """The CPU engine repacks weights when it loads them, which `load_weights` alone does not undo."""
        from basis_rl.rollout.worker import WeightSync

        worker = self.llm.llm_engine.model_executor.driver_worker
        worker = getattr(worker, "worker", worker)
        copies = ((name, parameter.detach().clone()) for name, parameter in self._iter_named_params())
        worker.reload_weights(weights_iterator=copies)
        WeightSync.basis_retie(worker)
        self.llm.reset_prefix_cache()

    def _colocated_log_probs(self) -> Tensor:
        from basis_rl.rollout.colocated import prompt_log_probs

        if self.enable_sleep_mode:  # TRL wakes the cache only when it generates
            self.llm.wake_up(tags=["kv_cache"])
        return prompt_log_probs(self.llm, self.probe)

    def _told_by_main(self, value: Any) -> Any:
        holder = [value]
        broadcast_object_list(holder, from_process=0)
        return holder[0]


@contextmanager
def _small_cpu_engine(dtype: str) -> Iterator[None]:
    """Within it TRL builds its engine without compilation, in the trained model's precision, and with a small cache."""
    size = int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) << 30
    small = partial(vllm_generation.LLM, enforce_eager=True, dtype=dtype, kv_cache_memory_bytes=size)
    with patch.object(vllm_generation, "LLM", small):
        yield


@contextmanager
def checked_generation(args: BasisConfig) -> Iterator[None]:
    """Within it, TRL's trainer builds a `Generation` where it would build a `VLLMGeneration`."""
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    exact = not (args.bf16 or args.fp16)
    settings = SyncSettings(
        transfer=("folder" if on_cpu else "nccl") if args.vllm_weight_sync == "auto" else args.vllm_weight_sync,
        folder=Path(args.vllm_sync_folder) if args.vllm_sync_folder else None,
        tolerance=args.vllm_sync_tolerance if args.vllm_sync_tolerance is not None else 1e-3 if exact else 1.0,
        request_timeout=args.vllm_request_timeout,
        recovery_timeout=args.vllm_recovery_timeout,
        fp32_head=args.cast_lm_head_to_fp32,
    )
    with patch.object(trl.trainer.grpo_trainer, "VLLMGeneration", partial(Generation, settings=settings)):
        yield
