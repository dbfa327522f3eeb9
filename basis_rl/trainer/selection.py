"""Which prompts each generation batch has: a prompt sampler's draws, by the belief about the value of every prompt."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from trl.trainer.utils import RepeatSampler

from basis_rl.baselines import Baseline, BasisHistory
from basis_rl.baselines.reward_range import RewardRange
from basis_rl.data import problem_text
from basis_rl.functional.selection import allocation
from basis_rl.run.errors import SelectionFailed
from basis_rl.samplers import Draw, PromptSampler, ValueBelief, sampler_name
from basis_rl.samplers.base import scaled_belief
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.rewarding import total_rewards
from basis_rl.types import RolloutBatch

_logger = logging.getLogger(__name__)
# Below so many draws of each prompt a belief from rewards alone was seen to choose no better than at random.
_FEW_DRAWS = 3
# Prompts that are looked at for a difference.
_SOME = 1000


@contextmanager
def _failing(sampler: PromptSampler, number: int) -> Iterator[None]:
    """Turn any exception of a sampler, which every rank raises alike, into one message.

    Raises:
        SelectionFailed: caused by it.
    """
    try:
        yield
    # Checks of the contract raise it, with a text that says what is wrong.
    except ValueError as error:
        name = sampler_name(sampler)
        message = f"Prompt sampler '{name}' has no prompts for generation batch {number}: {error}"
        raise SelectionFailed(message) from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise SelectionFailed(
            f"Prompt sampler '{sampler_name(sampler)}' raised {type(error).__name__} for generation batch {number}: "
            f"{str(error)[:500]} ({os.path.basename(where.filename)}, line {where.lineno})."
        ) from error


def drawn(
    sampler: PromptSampler,
    belief: ValueBelief,
    prompt_ids: Sequence[str],
    size: int,
    of: tuple[int, int, int] = (0, 0, 0),
) -> Draw:
    """A checked draw.

    Args:
        sampler: draws.
        belief: is given to it where it needs one, and for the metrics of a first draw.
        prompt_ids: of the dataset.
        size: how many prompts.
        of: seed of the run, number of the generation batch, number of the refill. All of them decide the random
            numbers, hashed: a seed may have any size.

    Raises:
        SelectionFailed: the sampler raises an exception, or returns something else.
    """
    digest = hashlib.blake2b(" ".join(map(str, of)).encode(), digest_size=8).digest()
    # A seed has at most 63 bits.
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    with _failing(sampler, of[1]):
        given = belief if sampler.needs_belief or of[2] == 0 else None
        draw = sampler.draw(prompt_ids, given, size, generator)
        return Draw.checked(draw, len(prompt_ids), size, correct=sampler.correct)


def tried_belief(
    sampler: PromptSampler,
    baseline: Baseline,
    prompt_ids: Sequence[str],
    texts: Iterable[str],
    args: BasisConfig,
    reward_range: tuple[float, float] | None = None,
) -> ValueBelief:
    """The belief by which a run's prompts are drawn, after a first draw that shows that the sampler works with it.

    Raises:
        ValueError: a prompt is in the dataset twice, or the sampler fails.
    """
    rows = Counter(prompt_ids)
    if len(rows) < len(prompt_ids):
        twice = next(name for name, count in rows.items() if count > 1)
        raise ValueError(
            f"prompt_sampler '{sampler_name(sampler)}' draws different prompts, but {len(prompt_ids) - len(rows)} of "
            f"{len(prompt_ids)} rows have the prompt_id of another row (first: '{twice}'). Leave them out, give "
            "different prompts different ids, or take prompt_sampler 'uniform' without max_generations."
        )
    belief: ValueBelief
    if isinstance(baseline, ValueBelief):
        belief = baseline
    else:
        belief = beside = BasisHistory(prior="text")
        beside.range.declare(reward_range)
        if beside.text_prior is not None:
            # A prompt that an environment makes has no text yet.
            beside.text_prior.know({name: text for name, text in zip(prompt_ids, texts, strict=True) if text})
    try:
        drawn(sampler, belief, prompt_ids, args.prompts_per_batch)
    # Nothing has been spent yet: a mistake in the settings.
    except SelectionFailed as error:
        raise ValueError(str(error)) from error
    _name_blind_draws(sampler, belief, prompt_ids, args)
    return belief


def _name_blind_draws(
    sampler: PromptSampler, belief: ValueBelief, prompt_ids: Sequence[str], args: BasisConfig
) -> None:
    """Warn if the run ends before the belief can tell prompts apart: it knows only of those that were drawn."""
    count = args.num_train_epochs
    if args.max_steps > 0:
        batches = args.max_steps * args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
        count = batches * args.prompts_per_batch / len(prompt_ids)
    reads_texts = "prompt_texts" in getattr(belief, "requires", ())
    if not sampler.needs_belief or reads_texts or count >= _FEW_DRAWS:
        return
    mean, _ = belief.believed(prompt_ids[:_SOME])
    if bool((mean == mean[0]).all()):
        _logger.warning(
            "prompt_sampler '%s' will choose hardly better than 'uniform': this run draws each of %d prompts %.1f "
            "times on average, and the belief is the same about all that were not drawn yet. `baseline: basis_history` "
            "with `baseline_kwargs: {prior: text}` predicts new prompts from their texts; a value table helps too.",
            sampler_name(sampler), len(prompt_ids), count,
        )  # fmt: skip


def rows_of_rank(dataset: Dataset, rows: Tensor, accelerator: Accelerator) -> list[dict[str, Any]]:
    """This rank's part of the rows of a dataset with those indices, ``(N,)``.

    Each prompt is read once. Its rollouts get copies, because TRL adds later turns to a prompt in place.
    """
    different, places = rows.chunk(accelerator.num_processes)[accelerator.process_index].unique(return_inverse=True)
    columns = dataset[different.tolist()]
    read = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    # Twice as fast as copy.deepcopy.
    stored = [pickle.dumps(row) for row in read]
    return [pickle.loads(stored[place]) for place in places.tolist()]


@dataclass(eq=False)
class Selection:
    """Draws the prompts of each generation batch.

    A batch is drawn when it is generated, not in the order in which a data loader fetches rows, because the loader is a
    batch ahead: so the belief knows all rewards up to the last update. With ``rollouts: stream`` a block of prompts is
    drawn when their rollouts begin, and batches are put together from blocks (`adopt`).

    The random numbers of a draw depend on the run's seed and on the number of the batch alone, so a resumed run draws
    as the uninterrupted one; draws that were made ahead are in the checkpoint.

    The belief is the baseline's own where it has one (`ValueBelief`), else that of a `BasisHistory` beside it,
    which begins with what the texts of the prompts tell.

    Metrics: ``sampler/believed``, the mean believed value of the prompts that were drawn, and ``sampler/reward``, their
    mean reward; with ``max_generations``, ``sampler/group_size_max``, the most rollouts that a prompt of the batch has,
    and ``sampler/variance_saved``, the share of the believed variance of the batch's gradient that dividing them alike
    would add; ``sampler/believed_solved`` and ``sampler/believed_impossible``, shares of all prompts with a
    believed value above 0.95 and below 0.05 of the reward range; ``sampler/effective_prompts``, how many prompts a draw
    is spread over (Kish), as a share of all; ``sampler/coverage``, the share of prompts that were ever drawn;
    ``sampler/ratio_clipped``, with ``correct``, the share of ratios outside ``clip``; ``sampler/refills``, draws beyond
    the first one.
    """

    sampler: PromptSampler
    baseline: Baseline
    dataset: Dataset
    prompt_ids: Sequence[str]
    args: BasisConfig
    accelerator: Accelerator
    reward_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self.num_generations = self.args.num_generations
        self.size = self.args.prompts_per_batch
        texts = (problem_text(row.get("prompt", "")) for row in self.dataset)
        self.belief = tried_belief(self.sampler, self.baseline, self.prompt_ids, texts, self.args, self.reward_range)
        # The trainer updates and saves the baseline; only a separate belief is left to do here.
        separate = self.belief is not self.baseline
        self.own_belief = self.belief if separate and isinstance(self.belief, BasisHistory) else None
        self.seen = torch.zeros(len(self.prompt_ids), dtype=torch.bool)
        self.refills = 0
        self._draws: dict[int, Draw] = {}
        self._refilled: dict[int, tuple[Tensor, set[int]]] = {}
        # The prompts of all ranks in the last refill.
        self.asked = torch.zeros(0, dtype=torch.long)
        self._warned = False

    def _draw(self, number: int, size: int, refill: int = 0) -> Draw:
        draw = drawn(self.sampler, self.belief, self.prompt_ids, size, (self.args.seed, number, refill))
        names = [self.prompt_ids[row] for row in draw.rows.tolist()]
        mean, _ = self.belief.believed(names)
        counts, metrics = self._counts(names)
        return Draw(draw.rows, draw.ratio, {"believed": float(mean.mean()), **draw.metrics, **metrics}, counts)

    def _counts(self, names: Sequence[str]) -> tuple[Tensor | None, dict[str, float]]:
        """``(P,)`` rollouts of each prompt of a batch, by the belief about it, and metrics of that; None where all
        prompts have as many."""
        most = self.args.max_generations
        if most is None:
            return None, {}
        mean, _ = scaled_belief(self.belief, names)
        # Of a 0/1 reward under the belief: the mean of V (1 - V) and the variance of V together. Of others a bound.
        variances = mean * (1.0 - mean)
        counts = allocation(variances, len(names) * self.num_generations, self.baseline.min_group_size, most)
        alike = float(variances.sum()) / self.num_generations
        saved = 1.0 - float((variances / counts).sum()) / alike if alike else 0.0
        return counts, {"group_size_max": float(counts.max()), "variance_saved": saved}

    def sizes(self, number: int) -> Tensor:
        """``(P,)`` rollouts of each prompt of the generation batch with that number."""
        counts = self._draws[number].counts
        return torch.full((self.size,), self.num_generations) if counts is None else counts

    def draw(self, number: int) -> Draw:
        """A whole batch of prompts; `number` decides the random numbers."""
        return self._draw(number, self.size)

    def adopt(self, number: int, draw: Draw) -> None:
        """Give the generation batch with that number prompts that were drawn before."""
        self._draws[number] = draw

    def rows(self, number: int) -> list[dict[str, Any]]:
        """This rank's rows of the generation batch with that number, one per rollout; the first call draws them."""
        if number not in self._draws:
            self._draws[number] = self.draw(number)
        return self._of_rank(self._draws[number].rows, self.sizes(number))

    def _of_rank(self, prompts: Tensor, sizes: Tensor | int) -> list[dict[str, Any]]:
        return rows_of_rank(self.dataset, prompts.repeat_interleave(sizes), self.accelerator)

    def prompts(self, number: int) -> Tensor:
        """``(P,)`` rows of the dataset that the generation batch has now, on all ranks."""
        return self._refilled[number][0] if number in self._refilled else self._draws[number].rows

    def more(self, number: int, refill: int, refused: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """This rank's rows of other prompts in place of the refused groups of the batch.

        New prompts are those that were not drawn for this batch before, while there are any, then those that were
        refused: no prompt is in a batch twice.

        Args:
            number: of the generation batch.
            refill: 1, 2, ...
            refused: for each rank its refused groups, by their index on that rank. Rows are returned for as many groups
                as the longest of these lists has.
        """
        of_rank = self.size // len(refused)
        most = max(map(len, refused))
        batch, tried = self._refilled.setdefault(number, (self._draws[number].rows.clone(), set()))
        tried |= set(batch.tolist())
        at = [rank * of_rank + group for rank, own in enumerate(refused) for group in own]
        kept = set(batch.tolist()) - set(batch[at].tolist())
        found = self._draw(number, min(len(self.prompt_ids), most * len(refused) + len(tried)), refill).rows.tolist()
        # First prompts that were not tried for this batch, then refused ones, last those that it keeps.
        found.sort(key=lambda row: (row in tried) + (row in kept))
        wanted = [rank * most + new for rank, own in enumerate(refused) for new in range(len(own))]
        # Places of ranks that replace fewer groups than the others: generated, but not trained on.
        others = sorted(set(range(most * len(refused))) - set(wanted))
        rows = torch.empty(most * len(refused), dtype=torch.long)
        rows[wanted + others] = torch.tensor(found[: len(rows)])
        batch[at] = rows[wanted]
        tried |= set(rows.tolist())
        self.seen[rows] = True
        self.refills += 1
        self.asked = rows
        return self._of_rank(rows, self.num_generations)

    def weights(self, number: int) -> Tensor | None:
        """``(N,)`` factors for the advantages of the batch; None where the sampler does not correct."""
        if not self.sampler.correct:
            return None
        ratio = self._draws[number].ratio
        # Checked when it was drawn.
        assert ratio is not None
        sizes = self.sizes(number)
        # A prompt with more rollouts than the others has a smaller weight for each.
        return (ratio.clamp(*self.sampler.clip) * (self.num_generations / sizes)).repeat_interleave(sizes)

    def chances(self, number: int) -> list[float | None]:
        """``(N,)`` the chance with which the prompt of each rollout was drawn; None where it is not known."""
        ratio = self._draws[number].ratio
        # The chance of a prompt that replaces another is not known.
        if ratio is None or number in self._refilled:
            return [None] * (self.size * self.num_generations)
        found = self.size / len(self.prompt_ids) / ratio
        chances: list[float | None] = found.repeat_interleave(self.sizes(number)).tolist()
        return chances

    def take_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Metrics of the batch's draw and of its rewards; the draw is forgotten."""
        draw = self._draws.pop(batch.step)
        self._refilled.pop(batch.step, None)
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
        return {f"sampler/{name}": value for name, value in metrics.items()}

    def update(self, batch: RolloutBatch) -> None:
        """Update the separate belief, if there is one; warn once if rewards are outside what a belief can hold."""
        if self.own_belief is not None:
            self.own_belief.update(batch)
        learnt = getattr(self.belief, "range", None)
        if isinstance(learnt, RewardRange) and not learnt.known:
            return
        low, high = self.belief.reward_range
        # Rewards are float32, so they may be a rounding error outside.
        slack = 1e-6 * (high - low)
        outside = int(((batch.rewards < low - slack) | (batch.rewards > high + slack)).sum())
        if outside and not self._warned and self.sampler.needs_belief:
            self._warned = True
            _logger.warning(
                "%d rewards are outside %g to %g, and the belief that chooses prompts takes them for the nearer end. "
                "Leave out fixed_range, build the value table of basis with such rewards, or let the belief tell the "
                "right `reward_range`.",
                outside, low, high,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {
            "belief": self.own_belief.state_dict() if self.own_belief is not None else None,
            "seen": self.seen.clone(),
            "draws": {
                number: (draw.rows, draw.ratio, draw.metrics, draw.counts) for number, draw in self._draws.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result. If the baseline of the saved run was the belief, there is none to restore."""
        if self.own_belief is not None and state["belief"] is not None:
            self.own_belief.load_state_dict(state["belief"])
        self.seen = state["seen"].clone()
        self._draws = {int(number): Draw(*fields) for number, fields in state["draws"].items()}


class Coverage:
    """The share of prompts that were ever sampled, where prompts come in dataset order."""

    def __init__(self, prompt_ids: Iterable[str]) -> None:
        self.seen = set[str]()
        self.prompts = len(set(prompt_ids))

    def take_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Count the prompts of a batch: ``sampler/coverage``."""
        self.seen.update(batch.prompt_ids)
        return {"sampler/coverage": len(self.seen) / self.prompts}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": sorted(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = set(state["seen"])


class EpochIndices(RepeatSampler):
    """TRL's sampler of dataset indices, which knows the epoch: a resumed run must find the same order in any epoch.

    TRL's draws one permutation per epoch from one generator, so that a run resumed in epoch e would walk through epoch
    0 again. Here the generator is reset in each epoch and skips e permutations, which gives the same order as TRL.

    Args:
        epoch: tells the epoch, when iteration starts.
        **kwargs: as in TRL.
    """

    def __init__(self, *, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            # TRL draws one permutation per epoch from the same generator.
            for _ in range(self.epoch()):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


Generated = tuple[Any, ...]
# Of what TRL's `_generate` returns: lists with an entry per rollout, or None.
_OF_ROLLOUTS = (0, 1, 2, 3, 4, 7)


@dataclass
class Resampling:
    """Replaces groups that the sampler does not keep by other prompts' (DAPO), at most `max_refills` times.

    TRL generates a batch, scores it with the policy, and then rewards it. Here a batch is rewarded as soon as it is
    generated, and its refused groups are generated again, prompt by prompt in the same places, so that TRL continues
    with one batch as if it had been drawn at once; the rewards are handed to it when it asks. Groups
    are whole on each rank, and every rank draws as many as the one that misses most: generation is collective.

    Groups that were rewarded and are not trained on are kept for the belief (`take_discarded`): otherwise it would see
    only the mixed groups of a prompt that is solved once in twenty times.

    Args:
        selection: draws, and keeps or refuses groups.
        generate: TRL's `_generate`.
        score: rows, prompts, rollouts, token ids -> ``(N, F)`` rewards of all ranks; what the functions log is kept.
        score_unlogged: the same, but what the functions log is dropped.
        weights: ``(F,)`` of the reward functions.
    """

    selection: Selection
    generate: Callable[[list[Any]], Generated]
    score: Callable[..., Tensor]
    score_unlogged: Callable[..., Tensor]
    weights: Tensor
    inputs: list[dict[str, Any]] = field(default_factory=list, init=False)
    # Row of the dataset, and rewards of its group, in the order in which they were discarded.
    _discarded: list[tuple[int, Tensor]] = field(default_factory=list, init=False)

    def generated(
        self, prompts: list[Any], number: int, extra_logs: Mapping[str, list[Any]]
    ) -> tuple[Generated, Tensor]:
        """TRL's `_generate` of `prompts`; refused groups are replaced in its result, in `prompts` and in ``inputs``.
        The second value is ``(N, F)``, the rewards of the batch.

        Args:
            prompts: this rank's, one per rollout.
            number: of the generation batch.
            extra_logs: what reward functions logged of each rollout; of one that is replaced it becomes None.
        """
        size = self.selection.num_generations
        local = len(prompts)
        rank = self.selection.accelerator.process_index
        self._discarded = []
        # Copies, because refused rollouts are replaced in place.
        result = [list(part) if isinstance(part, list) else part for part in self.generate(prompts)]
        rewards = self.score(self.inputs, prompts, result[3], result[1])
        for refill in range(1, self.selection.sampler.max_refills + 1):
            refused = self._refused(rewards, number)
            most = max(len(places) for places in refused)
            if most == 0:
                break
            groups = [of * local // size + group for of, places in enumerate(refused) for group in places]
            self._discard(self.selection.prompts(number), rewards, groups)
            rows = self.selection.more(number, refill, refused)
            asked = [copy.deepcopy(row["prompt"]) for row in rows]
            drawn = self.generate(asked)
            scores = self.score_unlogged(rows, asked, drawn[3], drawn[1])
            spare = [of * most + new for of, places in enumerate(refused) for new in range(len(places), most)]
            self._discard(self.selection.asked, scores, spare)
            # Rewards are those of all ranks, so every rank puts in those of the others as well.
            for of_rank, places in enumerate(refused):
                for new, group in enumerate(places):
                    at = of_rank * local + group * size
                    fresh = (of_rank * most + new) * size
                    rewards[at : at + size] = scores[fresh : fresh + size]
            for new, group in enumerate(refused[rank]):
                old_rows = slice(group * size, (group + 1) * size)
                new_rows = slice(new * size, (new + 1) * size)
                for part in _OF_ROLLOUTS:
                    if isinstance(result[part], list) and len(result[part]) == local:
                        result[part][old_rows] = drawn[part][new_rows]
                prompts[old_rows] = asked[new_rows]
                self.inputs[old_rows] = rows[new_rows]
                for column in extra_logs.values():
                    # A function may have logged fewer values than there are rollouts.
                    column[old_rows] = [None] * len(column[old_rows])
        return tuple(result), rewards

    def _discard(self, rows: Tensor, rewards: Tensor, groups: Sequence[int]) -> None:
        """Keep the totals of some groups of ``(N, F)`` rewards of prompts in `rows`, ``(P,)``."""
        totals = total_rewards(rewards, self.weights).cpu().view(len(rows), -1)
        self._discarded += [(int(rows[group]), totals[group]) for group in groups]

    def take_discarded(self, step: int, texts: bool) -> RolloutBatch | None:
        """The rollouts of the batch that are not trained on: rewards, groups and prompts, with `texts` also their
        texts."""
        discarded = self._discarded
        self._discarded = []
        if not discarded:
            return None
        size = self.selection.num_generations
        chosen = self.selection
        rows = [row for row, _ in discarded for _ in range(size)]
        return RolloutBatch(
            rewards=torch.cat([rewards for _, rewards in discarded]),
            group_ids=torch.arange(len(discarded)).repeat_interleave(size),
            prompt_ids=[chosen.prompt_ids[row] for row in rows],
            action_mask=torch.zeros((len(rows), 0), dtype=torch.bool),
            prompt_texts=[problem_text(chosen.dataset[row]["prompt"]) for row in rows] if texts else None,
            step=step,
        )

    def _refused(self, rewards: Tensor, number: int) -> list[list[int]]:
        """For each rank, the indices on that rank of the groups that the sampler refuses.

        Raises:
            SelectionFailed: the sampler raises an exception, or does not tell.
        """
        selection = self.selection
        totals = total_rewards(rewards, self.weights).cpu().view(-1, selection.num_generations)
        with _failing(selection.sampler, number):
            kept = selection.sampler.keeps(totals)
            if not isinstance(kept, Tensor) or kept.dtype != torch.bool or len(kept) != len(totals):
                raise ValueError(f"`keeps` must return one bool for each of {len(totals)} groups.")
        of_ranks = kept.view(selection.accelerator.num_processes, -1)
        return [(~of_rank).nonzero().flatten().tolist() for of_rank in of_ranks]
