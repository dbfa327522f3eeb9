"""Golds that no answer can equal, found by the reward functions that can tell (`GoldChecker`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from basis_rl.rewards.base import GoldChecker


def gold_columns(checker: GoldChecker) -> Sequence[str]:
    """The columns that a `GoldChecker` is given."""
    return getattr(checker, "gold_columns", ("solution",))


def invalid_golds(reward: Any, dataset: Any) -> list[int]:
    """Indices of rows whose gold is missing, or which no answer could equal; none if the reward cannot tell.

    Args:
        reward: a reward function.
        dataset: a Dataset, of which the reward is given its `gold_columns`.
    """
    names = gold_columns(reward)
    if not isinstance(reward, GoldChecker) or not set(names) <= set(dataset.column_names):
        return []
    columns = [list(dataset[name]) for name in names]
    # The second condition is true of NaN.
    missing = {index for index, gold in enumerate(columns[0]) if gold is None or gold != gold}
    return sorted(missing.union(reward.check_golds(*columns)))


def without_invalid_golds(
    dataset: Any, reward_funcs: Sequence[Any], found: Sequence[Sequence[int]], way_out: str | None, name: str = ""
) -> Any:
    """A Dataset without the rows of invalid golds.

    Args:
        dataset: of which `found` are `invalid_golds`.
        reward_funcs: the reward functions.
        found: the rows that each of them finds.
        way_out: what to do instead of fixing the golds, if they are to be refused; None drops them.
        name: of the dataset, where there are several.

    Raises:
        ValueError: there are invalid golds, and a `way_out`.
    """
    rows = set().union(*found)
    if not rows:
        return dataset
    if way_out is not None:
        checker = next(each for each, wrong in zip(reward_funcs, found, strict=True) if wrong)
        golds = list(dataset[gold_columns(checker)[0]])
        shown = "\n  ".join(f"row {i}: {_shown(golds[i])}" for i in sorted(rows)[:5])
        numbers = any(isinstance(golds[i], (int, float)) and golds[i] == golds[i] for i in rows)
        fix = "Make texts of numbers, fix" if numbers else "Fix"
        raise ValueError(
            f"{name and f'{name}: '}{len(rows)} of {len(dataset)} golds do not verify against themselves, so no answer "
            "to them could be right (rows are counted from 0, without duplicates and the other split):\n"
            f"  {shown}\n{fix} or remove "
            f"them, or {way_out}. {getattr(checker, 'gold_help', '')}".rstrip()
        )
    return dataset.select([i for i in range(len(dataset)) if i not in rows])


def _shown(gold: Any) -> str:
    return repr(gold[:100] if isinstance(gold, str) else gold)[:200]
