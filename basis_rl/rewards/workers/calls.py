"""Calls of a Python function in worker processes: each has its time and its memory, and none can hurt the trainer."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from basis_rl.rewards.base import LogMetric, log_shares
from basis_rl.rewards.workers.failures import FailureMonitor
from basis_rl.rewards.workers.pool import Outcome, WorkerPool
from basis_rl.sandbox import Policy, python_paths

WALL_CLOCK = 10.0  # times the CPU time: nine of ten processor seconds may go to others
_IMPORT_BYTES = 4 << 30
_FOLDER_BYTES = 64 << 20
_THREADS = 16  # numerical libraries start some when they are imported


class FunctionError(RuntimeError):
    """A function that scores rollouts raised, or returned no number: a bug of it. Holds its traceback."""


@dataclass(frozen=True)
class Score:
    """How one call ended; `value` is what the function returned, or `Calls.over_limit` for a call that ran out of time
    or memory; `detail` the traceback of an ``error``.

    ``failed`` is not the call's doing (`Outcome.failed`).
    """

    status: Literal["ok", "timeout", "memory", "failed", "error"]
    value: float | None = None
    detail: str = ""


class Calls:
    """A function that is called in up to `num_workers` processes, with JSON arguments, and returns numbers or None.

    Args:
        name: of the reward, in its metrics.
        target: ``module:name`` or ``module.name``, where the working directory is searched too, or
            ``/path/of/file.py:name``.
        num_workers: processes (of this rank), which start with the first call.
        timeout: seconds of CPU time for one call.
        memory_bytes: address space that a worker may take beyond its imports.
        wall_timeout: seconds by the clock, for calls that sleep; default: ten times `timeout`.
        over_limit: value of a call that ran out of time or memory.
        shut_in: take network, writing and what else this machine can (`basis_rl.sandbox`) from the workers: for
            functions that run what a model wrote.
    """

    def __init__(
        self,
        name: str,
        target: str,
        num_workers: int,
        timeout: float,
        memory_bytes: int,
        wall_timeout: float | None = None,
        over_limit: float | None = 0.0,
        *,
        shut_in: bool = False,
    ) -> None:
        self.name, self.target, self.over_limit = name, target, over_limit
        worker = Path(__file__).with_name("call_worker.py")
        command = [sys.executable, "-P", str(worker), target, str(timeout), str(int(memory_bytes))]
        policy = Policy(
            memory_bytes=int(memory_bytes) + _IMPORT_BYTES,
            file_bytes=_FOLDER_BYTES,
            processes=_THREADS,
            readable=python_paths(),
            folder_bytes=_FOLDER_BYTES,
        )
        wall = WALL_CLOCK * timeout if wall_timeout is None else wall_timeout
        self._pool = WorkerPool(command, num_workers, wall, cpu_timeout=timeout, policy=policy if shut_in else None)
        self._failures = FailureMonitor(name=f"The reward function '{Path(target).name}'")

    def describe(self) -> dict[str, Any]:
        """What the worker says of the function.

        Raises:
            ValueError: it cannot be imported; with the traceback.
        """
        found = self._pool.run([{"describe": True}])[0].value
        if "broken" in found or not found:
            raise ValueError(f"'{self.target}' cannot be imported:\n{found.get('broken', 'its process died')}")
        return found

    def run(self, calls: Sequence[tuple[Sequence[Any], dict[str, Any]]], log_metric: LogMetric = None) -> list[Score]:
        """The scores of ``(args, kwargs)``, in order.

        Logs ``reward/NAME/timeout``, ``.../memory`` and, for ``failed``, ``.../infrastructure``, shares of the calls.

        Raises:
            RewardInfrastructureError: too many of the recent calls failed (`FailureMonitor`).
        """
        outcomes = self._pool.run([{"args": list(args), "kwargs": kwargs} for args, kwargs in calls]) if calls else []
        scores = [self._score(outcome) for outcome in outcomes]
        why = ", ".join(sorted({outcome.status for outcome in outcomes if outcome.failed}))
        count = Counter(score.status for score in scores)
        self._failures.record(len(scores) - count["failed"], count["failed"], why)
        shares = {"timeout": count["timeout"], "memory": count["memory"], "infrastructure": count["failed"]}
        log_shares(log_metric, self.name, shares, len(scores))
        return scores

    def _score(self, outcome: Outcome) -> Score:
        if outcome.failed:
            return Score("failed")
        if outcome.status == "timeout" or "memory" in outcome.value:
            return Score("memory" if outcome.value else "timeout", self.over_limit)
        if "value" in outcome.value:
            return Score("ok", outcome.value["value"])
        return Score("error", detail=outcome.value.get("error") or outcome.value.get("broken", ""))

    def close(self) -> None:
        """End the processes; they also end with the object, and with the program."""
        self._pool.close()


def trl_signature(columns: Sequence[str]) -> inspect.Signature:
    """What a reward function takes that reads these columns: the trainer's checks look at it."""
    known = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("prompts", "completions")]
    read = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys(columns)]
    return inspect.Signature([*known, *read, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


def check_limits(reward: str, num_workers: Any, timeout: Any, memory_bytes: Any) -> None:
    """Refuse limits that are none.

    Raises:
        ValueError: `num_workers` below 1, or no positive `timeout` or `memory_bytes`.
    """
    numbers = all(isinstance(value, (int, float)) for value in (num_workers, timeout, memory_bytes))
    if not numbers or num_workers < 1 or num_workers != int(num_workers) or timeout <= 0 or memory_bytes <= 0:
        raise ValueError(
            f"{reward}: needs a whole num_workers >= 1, timeout > 0 (seconds) and memory_bytes > 0, got "
            f"{num_workers!r}, {timeout!r}, {memory_bytes!r}."
        )
