"""Calling reward functions outside of a training, in the way of TRL; and what they may return."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerState

_LARGEST = 3.4028234663852886e38  # of a float32


class WrongScores(Exception):
    """What is wrong with what a reward function returned."""


def call(
    function: Callable[..., Any], rows: Sequence[Mapping[str, Any]], said: Sequence[tuple[Any, Sequence[int]]]
) -> list[float]:
    """``(N,)`` rewards of rollouts by a function, called as TRL calls it; NaN where there is none.

    Args:
        function: the reward function.
        rows: of the dataset, one for each rollout, at least one.
        said: of each rollout the completion, a text or messages (a text becomes a message where the prompt is a
            conversation), and its token ids.

    Raises:
        ValueError: the function failed, or returned something else than a score for each rollout.
    """
    turns = [[{"role": "assistant", "content": text}] if isinstance(text, str) else text for text, _ in said]
    completions = [
        text if isinstance(row["prompt"], str) else turn for row, (text, _), turn in zip(rows, said, turns, strict=True)
    ]
    given = {
        **{name: [row[name] for row in rows] for name in rows[0] if name != "prompt"},
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": [list(token_ids) for _, token_ids in said],
        "trainer_state": TrainerState(),
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    try:
        found = function(**given)
        return scores_of(asyncio.run(found) if inspect.iscoroutine(found) else found, len(rows))
    except RuntimeError:
        # Of what the rewards run on.
        raise
    except Exception as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"{failure(name, error)}.") from error


def failure(name: str, error: Exception) -> str:
    """What a reward function did wrong, in a sentence without its full stop."""
    if isinstance(error, WrongScores):
        return f"The reward function '{name}' {error}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    where = f"({os.path.basename(at.filename)}, line {at.lineno})"
    return f"The reward function '{name}' raised {type(error).__name__}: {str(error)[:500]} {where}"


def scores_of(returned: Any, size: int) -> list[float]:
    """What a reward function returned as `size` finite float32 numbers; NaN where it returned None."""
    listed = isinstance(returned, Sequence) and not isinstance(returned, str | bytes)
    flat = listed or getattr(returned, "ndim", None) == 1
    if not flat:
        raise WrongScores(f"returned a {type(returned).__name__}, not a list with a number or None for each rollout")
    values = returned.tolist() if hasattr(returned, "tolist") else list(returned)
    if len(values) != size:
        raise WrongScores(f"returned {len(values)} rewards for {size} rollouts")
    scores = []
    for row, value in enumerate(values):
        try:
            score = math.nan if value is None else _number(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            shown = repr(value)[:100]
            raise WrongScores(f"returned {shown} for row {row}, which is neither a number nor None") from None
        if abs(score) > _LARGEST:
            raise WrongScores(f"returned {score:g} for row {row}, which is infinite as the float32 that rewards are")
        scores.append(score)
    return scores


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError
    return float(value)
