"""Generation of the next batch while this one is trained on."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from basis_rl.trainer.trainer import BasisTrainer

_logger = logging.getLogger(__name__)


class AskedAhead(Exception):
    """The request was sent, its answer will be there later. Raised on every rank where TRL expects the answer."""


@dataclass
class Ahead:
    """One request that is under way, on the main process.

    Attributes:
        request: what was asked, which only the same question may have the answer to.
        step: optimizer steps taken when it was asked.
        answer: None until it is there, and if the request failed.
    """

    request: dict[str, Any]
    step: int
    answer: dict[str, Any] | None = None
    thread: threading.Thread | None = None

    def send(self, ask: Callable[..., dict[str, Any]]) -> None:
        """Ask in a thread of its own, which does not keep the process from ending."""

        def work() -> None:
            try:
                self.answer = ask(**self.request)
            except Exception as error:  # the server is gone, say
                _logger.warning("The next batch could not be generated ahead (%s); it is asked for again.", error)

        self.thread = threading.Thread(target=work, name="prefetch", daemon=True)
        self.thread.start()

    def wait(self) -> float:
        """Until the answer is there or has failed; seconds waited."""
        start = time.monotonic()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        return time.monotonic() - start

    @property
    def done(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class Prefetch:
    """Asks the vLLM server for generation batch k + 1 as soon as it has the weights for it, before k is trained on.

    The weights that sample batch k + 1 are those with which the training on k begins, so rollouts are one generation
    batch old, never more: before the server gets new weights, what is under way is waited for. TRL's correction weighs
    them by ``pi_theta / pi_rollout``, the first being the policy at the start of training on them, from
    log-probabilities that the server gave with the tokens.

    The prompts of the next batch are read off the sampler's order. A batch that turns out to have other prompts, or
    whose request failed, is generated as without prefetch.

    Metrics: ``rollout/staleness``, optimizer steps between the weights that sampled and those that are trained;
    ``rollout/waited``, seconds that the answer was waited for.
    """

    def __init__(self, trainer: BasisTrainer) -> None:
        self.trainer = trainer
        self._generated = -1
        self._order: tuple[int, list[int]] = (-1, [])

    def after_generation(self) -> None:
        """Log how old the rollouts of this generation batch are, and ask for the next one, if the run has one."""
        trainer = self.trainer
        every = trainer.args.steps_per_generation * trainer.num_iterations
        number = trainer._step // every
        if number == self._generated:  # a second call in the same batch: ReMax's greedy rollouts
            return
        self._generated = number
        if trainer.accelerator.is_main_process:
            asked, waited = trainer.vllm_generation.last_taken()
            metrics = trainer._metrics["train"]
            metrics["rollout/staleness"].append(0.0 if asked is None else float(trainer.state.global_step - asked))
            metrics["rollout/waited"].append(waited)
        if (number + 1) * every < trainer.state.max_steps * trainer.args.gradient_accumulation_steps:
            prompts = [copy.deepcopy(row["prompt"]) for row in self.rows(number + 1)]
            prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
            trainer.vllm_generation.ask_ahead(prompt_ids, trainer.num_generations, trainer.state.global_step)

    def rows(self, number: int) -> list[dict[str, Any]]:
        """This rank's rows of the generation batch with that index, counted from the start of training."""
        trainer = self.trainer
        dataset: Any = trainer.train_dataset
        size = trainer.args.generation_batch_size
        epoch, place = divmod(number, len(dataset) * trainer.num_generations // size)
        if self._order[0] != epoch:
            self._order = (epoch, list(trainer.epoch_order(epoch)))
        mine = size // trainer.accelerator.num_processes
        first = place * size + trainer.accelerator.process_index * mine
        return [dataset[index] for index in self._order[1][first : first + mine]]

    def state_dict(self) -> dict[str, Any]:
        """The next batch's rollouts for a checkpoint: their weights are gone when it is resumed. On the main process.

        What is under way is waited for, unless the run was told to stop: then the next batch is generated anew.
        """
        if not self.trainer.accelerator.is_main_process:
            return {}
        client = self.trainer.vllm_generation.vllm_client
        if client.ahead is not None and not (self.trainer.stop_on_signal.stopped and not client.ahead.done):
            client.settle()
        ahead = client.ahead
        if ahead is None or ahead.answer is None:
            return {}
        return {"request": ahead.request, "step": ahead.step, "answer": ahead.answer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result."""
        if state and self.trainer.accelerator.is_main_process:
            self.trainer.vllm_generation.vllm_client.ahead = Ahead(**state)

    def drop(self) -> None:
        """Forget the request that is under way."""
        if self.trainer.accelerator.is_main_process:
            self.trainer.vllm_generation.vllm_client.ahead = None
