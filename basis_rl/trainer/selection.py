"""Which prompts each generation batch has: a prompt sampler's draws, by the belief about the value of every prompt."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines import Baseline, BasisHistory
from basis_rl.samplers import Draw, PromptSampler, ValueBelief
from basis_rl.samplers.registry import sampler_name
from basis_rl.trainer.errors import SelectionFailed
from basis_rl.trainer.ports import SelectingRun
from basis_rl.types import RolloutBatch

_logger = logging.getLogger(__name__)


class Selection:
    """Draws the prompts of each generation batch.

    A batch is drawn when it is generated, not in the order in which a data loader fetches rows, because the loader is a
    batch ahead: so the belief knows all rewards up to the last update. With ``async_prefetch`` batch t + 1 is asked
    for, and so drawn, before the policy and the belief learn from batch t.

    The random numbers of a draw depend on the run's seed and on the number of the batch alone, so a resumed run draws
    as the uninterrupted one; draws that were made ahead are in the checkpoint.

    The belief is the baseline's own where it has one (`ValueBelief`), else that of a `BasisHistory` beside it,
    which begins with what the texts of the prompts tell.

    Metrics: ``sampler/believed``, the mean believed value of the prompts that were drawn, beside ``sampler/reward``,
    what they got; ``sampler/believed_solved`` and ``sampler/believed_impossible``, shares of all prompts with a
    believed value above 0.95 and below 0.05 of the reward range; ``sampler/effective_prompts``, how many prompts a draw
    is spread over (Kish), as a share of all; ``sampler/coverage``, the share of prompts that were ever drawn;
    ``sampler/ratio_clipped``, with ``correct``, the share of ratios outside ``clip``; ``sampler/refills``, draws beyond
    the first one.
    """

    def __init__(
        self,
        run: SelectingRun,
        sampler: PromptSampler,
        baseline: Baseline,
        prompt_ids: Sequence[str],
        texts: Iterable[str],
    ) -> None:
        self.run, self.sampler = run, sampler
        self.own_belief = None if isinstance(baseline, ValueBelief) else BasisHistory(prior="text")
        self.belief: ValueBelief = baseline if isinstance(baseline, ValueBelief) else self.own_belief or BasisHistory()
        self.prompt_ids = prompt_ids
        if self.own_belief is not None and self.own_belief.text_prior is not None:
            self.own_belief.text_prior.know(dict(zip(prompt_ids, texts, strict=True)))
        self.size = run.args.generation_batch_size // run.num_generations
        self.seen = torch.zeros(len(prompt_ids), dtype=torch.bool)
        self.refills = 0
        self._draws: dict[int, Draw] = {}
        self._warned = False
        try:
            self._draw(0, self.size)
        except SelectionFailed as error:  # nothing has been spent yet: a mistake in the settings
            raise ValueError(str(error)) from error

    def _draw(self, number: int, size: int, refill: int = 0) -> Draw:
        generator = torch.Generator().manual_seed((self.run.args.seed << 40) + (number << 8) + refill)
        belief = self.belief if self.sampler.needs_belief else None
        try:
            draw = self.sampler.draw(self.prompt_ids, belief, size, generator)
        except ValueError as error:
            name = sampler_name(self.sampler)
            raise SelectionFailed(
                f"Prompt sampler '{name}' has no prompts for generation batch {number}: {error}"
            ) from error
        rows = draw.rows.tolist()
        if len(set(rows)) != size or not all(0 <= row < len(self.prompt_ids) for row in rows):
            raise SelectionFailed(
                f"Prompt sampler '{sampler_name(self.sampler)}' did not draw {size} different prompts for generation "
                f"batch {number}. `basis_rl.samplers.check_sampler` tells what else it breaks."
            )
        mean, _ = self.belief.believed([self.prompt_ids[row] for row in rows])
        return Draw(draw.rows, draw.ratio, {"believed": float(mean.mean()), **draw.metrics})

    def rows(self, number: int) -> list[dict[str, Any]]:
        """This rank's rows of the generation batch with that number, one per rollout; drawn unless it has been."""
        if number not in self._draws:
            self._draws[number] = self._draw(number, self.size)
        return self._of_rank(self._draws[number].rows)

    def _of_rank(self, prompts: Tensor) -> list[dict[str, Any]]:
        mine = prompts.repeat_interleave(self.run.num_generations).chunk(self.run.accelerator.num_processes)
        dataset = self.run.train_dataset
        return [dict(dataset[row]) for row in mine[self.run.accelerator.process_index].tolist()]

    def more(self, number: int, refill: int, size: int) -> list[dict[str, Any]]:
        """This rank's rows of `size` other prompts in place of some of the batch; not those that it was drawn with."""
        known = set(self._draws[number].rows.tolist())
        wanted = min(len(self.prompt_ids), size + len(known))
        drawn = self._draw(number, wanted, refill).rows
        fresh = [row for row in drawn.tolist() if row not in known] + [row for row in drawn.tolist() if row in known]
        rows = torch.tensor(fresh[:size])
        self.seen[rows] = True
        self.refills += 1
        return self._of_rank(rows)

    def weights(self, number: int) -> Tensor | None:
        """``(N,)`` what the advantages of the batch are multiplied by; None where the sampler does not correct."""
        if not self.sampler.correct:
            return None
        ratio = self._draws[number].ratio
        assert ratio is not None  # checked when the trainer was built
        return ratio.clamp(*self.sampler.clip).repeat_interleave(self.run.num_generations)

    def log(self, batch: RolloutBatch) -> None:
        """Log what was drawn and what it got; the draw is forgotten with it."""
        draw = self._draws.pop(batch.step)
        self.seen[draw.rows] = True
        metrics = {
            **draw.metrics,
            "reward": float(batch.rewards.nanmean()),
            "coverage": float(self.seen.float().mean()),
        }
        if self.sampler.correct and draw.ratio is not None:
            low, high = self.sampler.clip
            metrics["ratio_clipped"] = float(((draw.ratio < low) | (draw.ratio > high)).float().mean())
        if self.sampler.max_refills:
            metrics["refills"] = float(self.refills)
        self.refills = 0
        for name, value in metrics.items():
            self.run.log_metric(f"sampler/{name}", value)

    def update(self, batch: RolloutBatch) -> None:
        """Let the belief learn that is not the baseline's."""
        if self.own_belief is None:
            return
        self.own_belief.update(batch)
        low, high = self.own_belief.reward_range
        outside = int(((batch.rewards < low) | (batch.rewards > high)).sum())
        if outside and not self._warned and self.sampler.needs_belief:
            self._warned = True
            _logger.warning(
                "%d rewards are outside %g to %g, and the belief that chooses prompts takes them for the nearer end. "
                "Scale the rewards, or take a baseline with a value table (basis, basis_history): it knows the range.",
                outside, low, high,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {
            "sampler": self.sampler.state_dict(),
            "belief": self.own_belief.state_dict() if self.own_belief is not None else None,
            "seen": self.seen.clone(),
            "draws": {number: (draw.rows, draw.ratio, draw.metrics) for number, draw in self._draws.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result. If the baseline of the saved run was the belief, there is none to restore."""
        self.sampler.load_state_dict(state["sampler"])
        if self.own_belief is not None and state["belief"] is not None:
            self.own_belief.load_state_dict(state["belief"])
        self.seen = state["seen"].clone()
        self._draws = {int(number): Draw(*fields) for number, fields in state["draws"].items()}
