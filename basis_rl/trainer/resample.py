"""Groups that are not worth training on are replaced by other prompts' before anything is scored (DAPO)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from basis_rl.trainer.ports import RefillingRun
from basis_rl.trainer.rewarding import total_rewards

Generated = tuple[Any, ...]
_OF_ROLLOUTS = (0, 1, 2, 3, 4, 7)  # of what TRL's `_generate` returns: lists with an entry per rollout, or None


class Refill:
    """Draws groups again that the sampler does not keep, at most `max_refills` times, within TRL's `_generate`.

    TRL generates, scores the policy on what it has, and rewards it. Here a batch is rewarded as soon as it is
    generated, and its refused groups are generated again, prompt by prompt in the same places, so that TRL continues
    with one batch as if it had been drawn at once; the rewards are handed to it when it asks. Groups are whole on each
    rank, and every rank draws as many as the one that misses most: generation is collective.
    """

    def __init__(self, run: RefillingRun) -> None:
        self.run = run
        self.inputs: list[dict[str, Any]] = []
        self.rewards: Tensor | None = None

    def generate(self, generate: Callable[[list[Any]], Generated], prompts: list[Any]) -> Generated:
        """TRL's `_generate` of `prompts`, whose refused groups are replaced, there and in ``self.inputs``."""
        run, size = self.run, self.run.num_generations
        number = run._generation_batch
        result = [list(part) if isinstance(part, list) else part for part in generate(prompts)]
        rewards = run.score_rollouts(self.inputs, prompts, result[3], result[1])
        for refill in range(1, run.selection.sampler.max_refills + 1):
            refused = self._refused(rewards)
            most = max(len(places) for places in refused)
            if most == 0:
                break
            rank = run.accelerator.process_index
            rows = run.selection.more(number, refill, refused)
            asked = [copy.deepcopy(row["prompt"]) for row in rows]
            drawn = generate(asked)
            scores = run.scores_apart(rows, asked, drawn[3], drawn[1])
            local = len(prompts)
            for of_rank, places in enumerate(refused):
                for new, group in enumerate(places):
                    first, fresh = group * size, (of_rank * most + new) * size
                    rewards[of_rank * local + first : of_rank * local + first + size] = scores[fresh : fresh + size]
            for new, group in enumerate(refused[rank]):
                for k in range(size):
                    self._replace(result, drawn, prompts, rows, asked, group * size + k, new * size + k)
        self.rewards = rewards
        return tuple(result)

    def _refused(self, rewards: Tensor) -> list[list[int]]:
        """Of each rank the groups, counted on that rank, that are not kept."""
        run, size = self.run, self.run.num_generations
        totals = total_rewards(rewards, run.reward_weights).cpu().view(-1, size)
        kept = run.selection.kept(run._generation_batch, totals).view(run.accelerator.num_processes, -1)
        return [(~of_rank).nonzero().flatten().tolist() for of_rank in kept]

    def _replace(
        self, result: list[Any], drawn: Generated, prompts: list[Any], rows: Any, asked: list[Any], at: int, new: int
    ) -> None:
        """Put rollout `new` of a refill in place of rollout `at` of the batch."""
        for part in _OF_ROLLOUTS:
            if isinstance(result[part], list) and len(result[part]) == len(prompts):
                result[part][at] = drawn[part][new]
        prompts[at], self.inputs[at] = asked[new], rows[new]
        for column in self.run._pending_extra_logs.values():  # what the reward functions told of the one that is gone
            if at < len(column):
                column[at] = None

    def take(self) -> Tensor | None:
        """``(N, F)`` rewards of the batch, once, if it has been rewarded already."""
        rewards, self.rewards = self.rewards, None
        return rewards
