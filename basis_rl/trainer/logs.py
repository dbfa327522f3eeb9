"""Keeps apart what TRL's logs mix: training and evaluation, reward functions of one name, finite and infinite
numbers."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from basis_rl.data import problem_text
from basis_rl.functional.passk import pass_at_k
from basis_rl.types import RolloutBatch


def distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where several are the same: two lambdas would share one metric."""
    return [
        f"{name}_{names[:index].count(name) + 1}" if name in names[:index] else name for index, name in enumerate(names)
    ]


def of_kind(rows: Any, size: int) -> Any:
    """An empty log like `rows`, one deque or one for each column, that keeps the last `size` rollouts."""
    return deque(maxlen=size) if isinstance(rows, deque) else defaultdict(lambda: deque(maxlen=size))


@contextmanager
def set_aside(table: Path | None, name: str) -> Iterator[None]:
    """A file that is written to `table` within it is called `name` afterwards, and the file from before is restored."""
    if table is None:
        yield
        return
    kept = table.with_suffix(".kept")
    if table.exists():
        table.replace(kept)
    try:
        yield
    finally:
        if table.exists():
            table.replace(table.with_name(name))
        if kept.exists():
            kept.replace(table)


def per_rollout(values: Tensor, mask: Tensor) -> list[float]:
    """``(N,)`` of values of each rollout, or of each token: their means over the tokens that the policy sampled."""
    if values.ndim == 2:
        values = (values.cpu() * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return values.tolist()


def rollout_rows(
    logs: Mapping[str, Any],
    batch: RolloutBatch,
    baseline: Sequence[float],
    chances: Sequence[float | None] | None,
    ends: Sequence[tuple[int, bool, Any]],
) -> list[dict[str, Any]]:
    """The rollouts of a generation batch as they are kept (`basis_rl.run.rollouts`), from what TRL has logged of it.

    Args:
        logs: TRL's, which hold one generation batch.
        batch: of all ranks.
        baseline: value of each rollout, ``(N,)``.
        chances: of each rollout's prompt to be drawn, ``(N,)``; None where they are not known.
        ends: of each rollout the number of its tokens, whether it was cut off, and the gold (None without one).
    """
    size = len(baseline)
    # Without columns that a reward function did not log for this batch.
    extra = {name: values for name, values in logs["extra"].items() if len(values) == size}
    return [
        {
            "prompt_id": batch.prompt_ids[i],
            "prompt": _asked(logs["prompt"][i]),
            "completion": _said(logs["completion"][i]),
            "reward": _known(float(batch.rewards[i])),
            "rewards": {name: _known(values[i]) for name, values in logs["rewards"].items()},
            "baseline": _known(baseline[i]),
            "advantage": logs["advantages"][i],
            "chance": chances[i] if chances is not None else None,
            "tokens": ends[i][0],
            "cut_off": ends[i][1],
            "gold": ends[i][2],
            "extra": {name: values[i] for name, values in extra.items()},
        }
        for i in range(size)
    ]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _asked(prompt: Any) -> str:
    """What the model was asked: the problem, or all turns of a prompt with several."""
    turns = not isinstance(prompt, str) and len(prompt) > 1
    return _said(prompt) if turns else problem_text(prompt) or str(prompt)


def _said(completion: Any) -> str:
    """All that a rollout says: its text, or the messages of all turns, with thoughts and calls of tools."""
    if isinstance(completion, str):
        return completion
    parts = []
    for message in completion:
        said = [message.get(key) for key in ("reasoning_content", "thinking", "content", "tool_calls")]
        role = [f"[{message.get('role')}]"] if len(completion) > 1 else []
        parts += [*role, *(each if isinstance(each, str) else json.dumps(each, default=str) for each in said if each)]
    return "\n".join(parts)


class StepMeans:
    """Means over the tokens of an optimizer step, or of an evaluation, from what TRL logs of each micro-batch.

    TRL's log has the mean of the micro-batches' means, which depends on which rows share a micro-batch. Here
    ``sum_i n_i m_i / sum_i n_i`` with the mean ``m_i`` of micro-batch i over all ranks and its number ``n_i`` of tokens
    (of rollouts, for ratios of whole rollouts); of least and greatest values, the least and the greatest.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, int, int]]] = {}

    @contextmanager
    def taking(
        self, metrics: dict[str, list[float]], tokens: int, rollouts: tuple[int, int], of_rollouts: tuple[str, ...]
    ) -> Iterator[None]:
        """Take what is added to TRL's `metrics` within it out of them: what TRL logs of a micro-batch.

        Args:
            metrics: of the mode, by name.
            tokens: of this rank's micro-batch.
            rollouts: its rows as TRL counts them, and without those that fill it up to the rows of other ranks.
            of_rollouts: names that begin with one of these are means over rows, all others over tokens.
        """
        before = {name: len(values) for name, values in metrics.items()}
        yield
        for name, values in list(metrics.items()):
            new = values[before.get(name, 0) :]
            if new and _is_of_tokens(name):
                del values[len(values) - len(new) :]
                sizes = rollouts if name.startswith(of_rollouts) else (tokens, tokens)
                # VESPO's weight of a row without a rollout, whose ratio is 1, is 1; a clip ratio is 0.
                empty = (sizes[0] - sizes[1]) / max(1, sizes[0]) if name.startswith("vespo/") else 0.0
                self._found.setdefault(name, []).extend((value - empty, *sizes) for value in new)

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """The means of what was taken since the last call. Collective."""
        found, self._found = self._found, {}
        # TRL's values are of all ranks, so the sums over this rank's tokens add up to those over all.
        known = {name: [each for each in values if not math.isnan(each[0])] for name, values in found.items()}
        sums = [[sum(v * n for v, n, _ in each), sum(n for *_, n in each)] for each in known.values()]
        if not sums:
            return {}
        totals = accelerator.reduce(torch.tensor(sums, dtype=torch.float64).to(accelerator.device), reduction="sum")
        means = {}
        for (name, each), (total, count) in zip(known.items(), totals.tolist(), strict=True):
            least = min if name.endswith("_min") else max
            if not count:
                means[name] = math.nan
            elif name.endswith(("_min", "_max")):
                means[name] = least(value for value, *_ in each)
            else:
                means[name] = total / count
        return means

    def forget(self) -> None:
        """Drop what a step or an evaluation has left that did not end."""
        self._found = {}


def _is_of_tokens(name: str) -> bool:
    """Whether TRL or an objective logs a mean over tokens under that name, for each micro-batch."""
    return name in ("kl", "entropy", "cispo_clip_ratio") or name.startswith(("clip_ratio/", "vespo/", "objective/"))


def without_infinities(logs: dict[str, Any], metrics: Mapping[str, list[float]]) -> None:
    """Take out, in place, what JSON has no number for; TRL logs None for a metric whose values are all NaN."""
    for values in metrics.values():
        if any(map(math.isinf, values)):
            values[:] = [math.nan]
    for name, value in logs.items():
        if isinstance(value, float) and not math.isfinite(value):
            logs[name] = None


class EvalScores:
    """Rewards of one evaluation, by row of its set.

    TRL's ``eval_reward`` is the mean of the means of the batches, of which the last may be smaller and, on several
    ranks, filled up with rows from the start. Here every row counts once, whatever it shares with others.
    """

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def add(self, rewards: Tensor) -> None:
        """Take in a batch of all ranks, ``(N,)``, row after row; NaN where there is no score."""
        self.rewards += rewards.tolist()

    def take(self, num_rollouts: int, rows: int | None) -> dict[str, float]:
        """Return ``reward``, the mean of all scores; ``avg@n``, the same with 0 where there is no score, as of a wrong
        answer; and, where all of these are 0 or 1, ``pass@k`` for k = 2, 4, ... up to n. Reset the counts.

        Args:
            num_rollouts: of each row.
            rows: the length of the set; None for a stream, of which all that came counts.
        """
        scores = torch.tensor(self.rewards).double()[: rows and rows * num_rollouts]
        self.rewards = []
        if not len(scores):
            return {}
        rewards = scores.nan_to_num(nan=0.0).view(-1, num_rollouts)
        found = {"reward": float(scores.nanmean()), f"avg@{num_rollouts}": float(rewards.mean())}
        if bool(((rewards == 0) | (rewards == 1)).all()):
            right = rewards.sum(dim=1).long()
            ks = {2**i for i in range(1, num_rollouts.bit_length())} | ({num_rollouts} - {1})
            for k in sorted(ks):
                found[f"pass@{k}"] = float(pass_at_k(num_rollouts, right, k).mean())
        return found
