"""Calls reward functions outside of training as TRL calls them, and checks what they return."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from basis_rl.rewards.workers.failures import RewardInfrastructureError

# Columns that TRL does not hand on to reward functions: it has these itself.
_OWN_NAMES = frozenset({"prompt", "completion", "completion_ids"})
# The largest float32.
_LARGEST = 3.4028234663852886e38
_TRIED = (
    "This was a trial before the training, with a short answer to the first row. Functions get prompts, completions "
    "and every column as keywords, so they need **kwargs; in a conversation the completion is a list of messages."
)


class WrongScores(Exception):
    """What is wrong with what a reward function returned."""


def call(
    function: Callable[..., Any],
    rows: Sequence[Mapping[str, Any]],
    said: Sequence[tuple[str | list[dict[str, Any]], Sequence[int], bool]],
    logged: dict[str, Any] | None = None,
) -> list[float]:
    """``(N,)`` rewards of rollouts by a function, called as TRL calls it; NaN where there is none.

    Args:
        function: the reward function.
        rows: the dataset's row of each rollout; at least one, and all prompts are texts or all are conversations.
        said: of each rollout the text or its messages, the token ids, and whether the length limit cut it off (a
            `Completion`). Texts become messages where prompts are conversations.
        logged: gets what the function passes to ``log_extra``.

    Raises:
        ValueError: the function failed, or returned something else than a score for each rollout.
        RewardInfrastructureError: what the function runs on failed.
    """
    # Rewards alone do without transformers.
    from transformers import TrainerState

    prompts = [row["prompt"] for row in rows]
    given = reward_arguments(rows, prompts, said, TrainerState(), {} if logged is None else logged)
    try:
        return scores_of(called(function, given), len(rows))[0]
    except RewardInfrastructureError:
        raise
    except Exception as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"{failure(name, error)}.") from error


def called(function: Callable[..., Any], columns: Mapping[str, Any]) -> Any:
    """What a reward function returns when it is called as TRL calls it, except that nothing is logged."""
    given = {"trainer_state": None, "log_extra": lambda *_: None, "log_metric": lambda *_: None, **columns}
    return awaited(function(**given))


def awaited(value: Any) -> Any:
    """The result of a coroutine; a loop may be running in this thread already, as in a notebook."""
    if not inspect.iscoroutine(value):
        return value
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, value).result()


def reward_arguments(
    rows: Sequence[Mapping[str, Any]],
    prompts: list[Any],
    said: Sequence[tuple[str | list[dict[str, Any]], Sequence[int], bool]],
    trainer_state: Any,
    logged: dict[str, Any],
) -> dict[str, Any]:
    """What TRL passes to a reward function, and whether the length limit cut a rollout off.

    Args:
        rows: the dataset's row of each rollout; at least one.
        prompts: of each rollout.
        said: see `call`.
        trainer_state: of the run.
        logged: gets what the function passes to ``log_extra``.
    """
    conversational = not isinstance(prompts[0], str)
    return {
        **{name: [row[name] for row in rows] for name in rows[0] if name not in _OWN_NAMES},
        "prompts": prompts,
        "completions": [
            [{"role": "assistant", "content": text}] if conversational and isinstance(text, str) else text
            for text, *_ in said
        ],
        "completion_ids": [list(token_ids) for _, token_ids, _ in said],
        "truncated": [truncated for *_, truncated in said],
        "trainer_state": trainer_state,
        "log_extra": lambda name, values: logged.__setitem__(name, _column(name, values)),
    }


def _column(name: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise WrongScores(f"passed {values!r} to log_extra as '{name}', not a list with a value for each rollout")
    return list(values)


def try_reward(function: Callable[..., Any], row: Mapping[str, Any]) -> None:
    """Let a reward function score two short answers to `row`, before anything is spent.

    Raises:
        ValueError: it fails. What it runs on may be missing here, and that is not judged.
    """
    with suppress(RewardInfrastructureError):
        try:
            # Two rollouts show whether there is a reward for each.
            call(function, [{"prompt": "", **row}] * 2, [("1", [0], False)] * 2)
        except ValueError as error:
            raise ValueError(f"{error} {_TRIED}") from error


def failure(name: str, error: BaseException) -> str:
    """What a reward function did wrong, in a sentence without its full stop."""
    if isinstance(error, WrongScores):
        return f"The reward function '{name}' {error}"
    return f"The reward function '{name}' raised {said_where(error)}"


def said_where(error: BaseException) -> str:
    """What an exception says, and the line that raised it, unless that is the call itself."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if at.filename == __file__ else f" ({os.path.basename(at.filename)}, line {at.lineno})"
    return f"{type(error).__name__}: {str(error)[:500]}{place}"


def is_coroutine(function: Any) -> bool:
    """Whether a reward function, or the class of one, is ``async``; also with arguments bound (`functools.partial`)."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def scores_of(returned: Any, size: int) -> tuple[list[float], list[list[float]]]:
    """What a reward function returned as `size` finite float32 numbers; NaN where it returned None.

    The reward of a rollout that has a list of numbers, one for each turn, is their sum.

    Returns:
        The rewards; and of each rollout the numbers of its turns, empty where it has one number or none.
    """
    listed = isinstance(returned, Sequence) and not isinstance(returned, str | bytes)
    flat = listed or getattr(returned, "ndim", None) == 1
    if not flat:
        raise WrongScores(f"returned a {type(returned).__name__}, not a list with a number or None for each rollout")
    values = returned.tolist() if hasattr(returned, "tolist") else list(returned)
    if len(values) != size:
        raise WrongScores(f"returned {len(values)} rewards for {size} rollouts")
    scores = []
    by_turn = []
    for row, value in enumerate(values):
        has_turns = isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1
        try:
            numbers = [_number(each) for each in (value if has_turns else [math.nan if value is None else value])]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            shown = repr(value)[:100]
            raise WrongScores(
                f"returned {shown} for row {row}, which is neither a number, nor None, nor a list of numbers (one for "
                "each turn)"
            ) from None
        score = float(sum(numbers))
        for number in (*numbers, score):
            if abs(number) > _LARGEST:
                message = f"returned {number:g} for row {row}, which is infinite as the float32 that rewards are"
                raise WrongScores(message)
        scores.append(score)
        by_turn.append(numbers if has_turns and not math.isnan(score) else [])
    return scores, by_turn


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError
    return float(value)
