"""Generation of the next batch while this one is trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Prefetch:
    """Asks the vLLM server for generation batch k + 1 as soon as it has the weights for it, before k is trained on.

    The weights that sample batch k + 1 are those with which the training on k begins, so rollouts are one generation
    batch old, never more: the engine finishes what was asked ahead before it gets new weights. TRL's correction weighs
    them by ``pi_theta / pi_rollout``: pi_theta is the policy when training on them starts, and the server reported the
    log-probabilities of pi_rollout with the tokens.

    The prompts of the next batch follow from the order of the dataset, or the run's prompt sampler draws them. A batch
    that turns out to have other prompts, or whose request failed, is generated as without prefetch.

    Args:
        engine: the run's `basis_rl.engine.generation.Generation`.
        rows: this rank's rows of the generation batch with a given number.
        tokenize: prompts -> their token ids.
        is_main: whether this is the main process, which logs.
        is_stopping: whether the run has been asked to stop.
    """

    engine: Any
    rows: Callable[[int], list[dict[str, Any]]]
    tokenize: Callable[[list[Any]], list[list[int]]]
    is_main: bool
    is_stopping: Callable[[], bool]
    _generated: int = field(default=-1, init=False)

    def after_generation(self, number: int, last: int, num_generations: int, step: int) -> dict[str, float]:
        """Ask for the next batch, if the run has one.

        Args:
            number: of the generation batch that was generated just now.
            last: number of the run's last generation batch.
            num_generations: G.
            step: optimizer steps done.

        Returns:
            ``rollout/staleness``, optimizer steps between the weights that sampled and those that are trained, and
            ``rollout/waited``, seconds that the answer was waited for.
        """
        if number == self._generated:
            # A second call for the same batch: ReMax's greedy rollouts.
            return {}
        self._generated = number
        metrics: dict[str, float] = {}
        if self.is_main:
            asked, waited = self.engine.last_taken()
            staleness = 0.0 if asked is None else float(step - asked)
            metrics = {"rollout/staleness": staleness, "rollout/waited": waited}
        if number < last:
            prompts = [copy.deepcopy(row["prompt"]) for row in self.rows(number + 1)]
            self.engine.ask_ahead(self.tokenize(prompts), num_generations, step)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The next batch's rollouts, ``ahead``. A resumed run could not sample them again, since their weights are
        gone. None if there are none, and on all but the main process.

        It waits for a request that is running, unless the run is stopping: then the next batch is generated again.
        """
        return {"ahead": self.engine.ahead_state(wait=not self.is_stopping())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result."""
        self.engine.set_ahead(state["ahead"])
