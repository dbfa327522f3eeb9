"""Generation of the next batch while this one is trained on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from basis_rl.trainer.ports import PrefetchingRun


class Prefetch:
    """Asks the vLLM server for generation batch k + 1 as soon as it has the weights for it, before k is trained on.

    The weights that sample batch k + 1 are those with which the training on k begins, so rollouts are one generation
    batch old, never more: before the server gets new weights, what is under way is waited for. TRL's correction weighs
    them by ``pi_theta / pi_rollout``, the first being the policy at the start of training on them, from
    log-probabilities that the server gave with the tokens.

    The prompts of the next batch are read off the sampler's order, or drawn by the run's prompt sampler. A batch that
    turns out to have other prompts, or whose request failed, is generated as without prefetch.

    Metrics: ``rollout/staleness``, optimizer steps between the weights that sampled and those that are trained;
    ``rollout/waited``, seconds that the answer was waited for.
    """

    def __init__(self, run: PrefetchingRun) -> None:
        self.run = run
        self._generated = -1
        self._order: tuple[int, list[int]] = (-1, [])

    def after_generation(self) -> None:
        """Log how old the rollouts of this generation batch are, and ask for the next one, if the run has one."""
        run = self.run
        every = run.args.steps_per_generation * run.num_iterations
        number = run._step // every
        if number == self._generated:  # a second call in the same batch: ReMax's greedy rollouts
            return
        self._generated = number
        if run.accelerator.is_main_process:
            asked, waited = run.vllm_generation.last_taken()
            run.log_metric("rollout/staleness", 0.0 if asked is None else float(run.state.global_step - asked))
            run.log_metric("rollout/waited", waited)
        if (number + 1) * every < run.state.max_steps * run.args.gradient_accumulation_steps:
            prompts = [copy.deepcopy(row["prompt"]) for row in self.rows(number + 1)]
            prompt_ids, _, _ = run._tokenize_prompts(prompts)
            run.vllm_generation.ask_ahead(prompt_ids, run.num_generations, run.state.global_step)

    def rows(self, number: int) -> list[dict[str, Any]]:
        """This rank's rows of the generation batch with that index, counted from the start of training."""
        run = self.run
        if run.selection is not None:
            drawn: list[dict[str, Any]] = run.selection.rows(number)
            return drawn
        size = run.args.generation_batch_size
        epoch, place = divmod(number, len(run.train_dataset) * run.num_generations // size)
        if self._order[0] != epoch:
            self._order = (epoch, list(run.epoch_order(epoch)))
        mine = size // run.accelerator.num_processes
        first = place * size + run.accelerator.process_index * mine
        return [run.train_dataset[index] for index in self._order[1][first : first + mine]]

    def state_dict(self) -> dict[str, Any]:
        """The next batch's rollouts, ``ahead``: their weights are gone when the run is resumed. None where there are
        none, and on all but the main process.

        It waits for a request that is running, unless the run is stopping: then the next batch is generated again.
        """
        return {"ahead": self.run.vllm_generation.ahead_state(wait=not self.run.stop_on_signal.stopped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result."""
        self.run.vllm_generation.set_ahead(state["ahead"])

    def drop(self) -> None:
        """Forget the request that is under way."""
        self.run.vllm_generation.set_ahead(None)
