"""Building a value table: sample the reference model on every prompt, score with the training reward, keep it all."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm

from basis_rl.engine import Completion, Sampling, ServersLost, prompt_tokens
from basis_rl.engine.client import request_seed
from basis_rl.engine.template_day import template_day, use_day
from basis_rl.rewards.base import read_columns
from basis_rl.rewards.call import call
from basis_rl.values.provenance import fingerprint, rendered_prompt, run_provenance
from basis_rl.values.shards import Record, Shards, begun
from basis_rl.values.sources import Drawing, Source
from basis_rl.values.table import ValueTable

# Prompts whose rollouts the reward functions get in one call.
_SCORED_TOGETHER = 16


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    r"""What a table is made of; `build_table` does it.

    With an early exit, prompts whose first m rewards are all 0 or all 1 get no more than these m of the N planned
    rollouts. That biases their values: with independent 0/1 rewards of mean p, a prompt leaves with probability
    :math:`p^m + (1 - p)^m`, and the mean of its rewards then has

    .. math:: E[\hat p] - p = \frac{N - m}{N} \left( p^m (1 - p) - (1 - p)^m p \right),

    which is 0 at p = 1/2 and largest, for N = 32 and m = 8, near p = 1/9 (-0.032) and p = 8/9 (+0.032). The table
    holds m rewards of such a prompt, so that smoothing knows how little was seen.

    Args:
        dataset: columns ``prompt``, ``prompt_id`` and those that the reward functions read.
        reward_funcs: those of the training, called as TRL calls them, several prompts at a time.
        sampling: of the training.
        num_rollouts: N (BASIS Appendix D: 32 or 64).
        early_exit: m; 0 is none.
        seed: of the rollouts.
        reward_weights: of the training, default all 1.
        chat_template_kwargs: of the training.

    Raises:
        ValueError: no rollouts, m not in [0, N), or a prompt_id that is there twice.
    """

    dataset: Dataset
    reward_funcs: Sequence[Callable[..., Any]]
    sampling: Sampling
    num_rollouts: int = 32
    early_exit: int = 0
    seed: int = 0
    reward_weights: Sequence[float] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.num_rollouts < 1 or not 0 <= self.early_exit < self.num_rollouts:
            needs = "at least one rollout per prompt and an early exit after fewer than all"
            raise ValueError(f"A value table needs {needs}, got {self.num_rollouts} and {self.early_exit}.")
        if len(set(self.ids)) < len(self.ids):
            twice = next(prompt_id for prompt_id in self.ids if self.ids.count(prompt_id) > 1)
            raise ValueError(f"The dataset has the prompt_id '{twice}' twice. Remove the duplicates.")

    @property
    def ids(self) -> list[str]:
        return list(self.dataset["prompt_id"])

    @property
    def parts(self) -> list[int]:
        """Rollouts of each part."""
        return [self.early_exit, self.num_rollouts - self.early_exit] if self.early_exit else [self.num_rollouts]

    def is_certain(self, record: Record) -> bool:
        """Whether this first part is also the last."""
        return self.early_exit > 0 and record.part == 0 and set(record.rewards) in ({0.0}, {1.0})

    def fingerprints(self, tokenizer: Any) -> dict[str, str]:
        """A fingerprint of each rendered prompt, by its id."""
        template = self.chat_template_kwargs or {}
        prompts = zip(self.ids, self.dataset["prompt"], strict=True)
        return {name: fingerprint(rendered_prompt(prompt, tokenizer, template)) for name, prompt in prompts}

    def identity(self, config: Any, tokenizer: Any, sampler: str) -> dict[str, Any]:
        """Everything that the rewards depend on; a build that is resumed or merged must agree with it.

        Args:
            config: of the model; knows where it came from.
            tokenizer: its tokenizer.
            sampler: `Source.name`.
        """
        known = run_provenance(config, tokenizer, self.reward_funcs, self.sampling, self.reward_weights)
        rendered = json.dumps(self.fingerprints(tokenizer))
        counting = {"prompt", "solution", "prompt_id", *read_columns(self.reward_funcs)}
        read = self.dataset.select_columns([name for name in self.dataset.column_names if name in counting])
        rows = (json.dumps(row, sort_keys=True, default=str) for row in read)
        return {
            **known,
            "dataset": fingerprint("\n".join([rendered, *rows])),
            "num_rollouts": self.num_rollouts,
            "early_exit": self.early_exit,
            "seed": self.seed,
            "sampler": sampler,
            "template_day": template_day(),
        }


def use_first_day(known: Mapping[str, Any]) -> None:
    """Let chat templates write the day that a build or table with this identity began, or today; call it first."""
    use_day(known.get("template_day") or template_day())


def build_table(source: Source, plan: TablePlan, folder: Path, shard: tuple[int, int] = (0, 1)) -> ValueTable | None:
    """Rewards of each prompt's rollouts, with their provenance; what an earlier call finished is not repeated.

    Prompts none of whose rollouts could be scored are left out, and counted in a line of output.

    Args:
        source: of the rollouts.
        plan: what to do.
        folder: keeps what is finished; remove it when the table is saved.
        shard: ``(i, n)``: do the i-th of n parts, others are done by other processes with the same folder.

    Returns:
        The table, or None while parts of other processes are missing.

    Raises:
        ValueError: nothing at all could be scored, or the folder is that of another build.
        ServersLost: see `sample_servers`. What is finished is kept.
    """
    # Before any prompt is rendered, since a chat template may write the day into it.
    use_first_day(begun(folder))
    shards = Shards(folder, plan.identity(source.config, source.tokenizer, source.name))
    _Build(source, plan, shards).run(*shard)
    return merge_shards(plan, shards, plan.fingerprints(source.tokenizer))


def merge_shards(plan: TablePlan, shards: Shards, fingerprints: dict[str, str]) -> ValueTable | None:
    """The table from what all processes have finished; None while something is missing."""
    found = {record.key: record for record in shards.records()}
    rewards: dict[str, list[float]] = {}
    used: list[Record] = []
    for prompt_id in plan.ids:
        parts = [found.get((prompt_id, part)) for part in range(len(plan.parts))]
        if parts[0] is not None and plan.is_certain(parts[0]):
            parts = parts[:1]
        records = [record for record in parts if record is not None]
        if len(records) < len(parts):
            return None
        used += records
        rewards[prompt_id] = [reward for record in records for reward in record.rewards]
    scored = {prompt_id: rs for prompt_id, rs in rewards.items() if not all(math.isnan(r) for r in rs)}
    if left_out := len(rewards) - len(scored):
        print(f"{left_out} of {len(rewards)} prompts are left out: none of their rollouts was scored.")
    drawn = {
        "rollouts": sum(len(record.rewards) for record in used),
        "tokens": sum(record.tokens for record in used),
        "truncated": sum(record.truncated for record in used),
        "date": datetime.date.today().isoformat(),
    }
    return ValueTable.from_rewards(scored, fingerprints=fingerprints, provenance={**shards.identity, **drawn})


class _Build:
    """One process's part of a build."""

    def __init__(self, source: Source, plan: TablePlan, shards: Shards) -> None:
        self.source = source
        self.plan = plan
        self.shards = shards
        template = plan.chat_template_kwargs or {}
        self.ids = plan.ids
        self.prompts = [prompt_tokens(prompt, source.tokenizer, template) for prompt in plan.dataset["prompt"]]
        self.weights = torch.tensor(plan.reward_weights or [1.0] * len(plan.reward_funcs))
        self.done: set[tuple[str, int]] = set()
        self.certain: set[str] = set()

    def run(self, shard: int, of: int) -> None:
        """Draw and score what is missing of part `shard`."""
        mine = self.source.chunks(self.prompts, max(self.plan.parts))[shard::of]
        own = {self.ids[i] for chunk in mine for i in chunk}
        finished = sum(self._note(record) * (record.prompt_id in own) for record in self.shards.records())
        name = "value table" + (f" {shard}/{of}" if of > 1 else "")
        bar = partial(tqdm, total=len(own) * self.plan.num_rollouts, desc=name, unit="rollout", mininterval=2)
        with self.shards.writer(shard, of) as write, bar(initial=finished) as progress:
            for part in range(len(self.plan.parts)):
                for record in self._records(mine, part):
                    write(record.line())
                    progress.update(self._note(record))

    def _note(self, record: Record) -> int:
        """Note a finished record; returns how many of the planned rollouts it settles."""
        self.done.add(record.key)
        if not self.plan.is_certain(record):
            return len(record.rewards)
        self.certain.add(record.prompt_id)
        return self.plan.num_rollouts

    def _records(self, mine: list[list[int]], part: int) -> Iterator[Record]:
        """The records of one part that are missing; a chunk is drawn whole, as it was the first time."""
        chunks = [[i for i in chunk if part == 0 or self.ids[i] not in self.certain] for chunk in mine]
        chunks = [chunk for chunk in chunks if any((self.ids[i], part) not in self.done for i in chunk)]
        # The part counts in the seed, so that the second part does not repeat the rollouts of the first.
        seeds = {tuple(chunk): request_seed(self.plan.seed, part, *(self.ids[i] for i in chunk)) for chunk in chunks}
        with closing(self.source.draw(self.prompts, seeds, self.plan.sampling, self.plan.parts[part])) as drawn:
            for ready in _together(drawn):
                missing = [(i, rollouts) for i, rollouts in ready if (self.ids[i], part) not in self.done]
                scores = iter(self._score(missing))
                for i, rollouts in missing:
                    yield Record(
                        prompt_id=self.ids[i],
                        part=part,
                        rewards=[next(scores) for _ in rollouts],
                        tokens=sum(len(rollout.token_ids) for rollout in rollouts),
                        truncated=sum(rollout.truncated for rollout in rollouts),
                    )

    def _score(self, drawn: Sequence[tuple[int, list[Completion]]]) -> list[float]:
        """``(sum of rollouts,)`` weighted rewards, NaN where no function has one."""
        by_prompt = [(self.plan.dataset[i], rollouts) for i, rollouts in drawn]
        rows = [(row, rollout) for row, rollouts in by_prompt for rollout in rollouts]
        if not rows:
            return []
        given = ([row for row, _ in rows], [rollout for _, rollout in rows])
        columns = [call(function, *given) for function in self.plan.reward_funcs]
        scores = torch.tensor(columns, dtype=torch.float32).T
        total = (scores * self.weights).nansum(dim=1).masked_fill(scores.isnan().all(dim=1), torch.nan)
        return total.tolist()


def _together(drawn: Drawing) -> Iterator[list[tuple[int, list[Completion]]]]:
    """What is drawn in lists; what came before servers were lost comes before the error."""
    ready: list[tuple[int, list[Completion]]] = []
    try:
        for each in drawn:
            ready.append(each)
            if len(ready) == _SCORED_TOGETHER:
                yield ready
                ready = []
    except ServersLost:
        yield ready
        raise
    yield ready
