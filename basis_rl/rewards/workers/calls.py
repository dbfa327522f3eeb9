"""Calls of a Python function in worker processes: each has its time and its memory, and none can hurt the trainer."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from basis_rl.rewards.base import LogMetric, Scores, log_shares
from basis_rl.rewards.variables import variables, without_values
from basis_rl.rewards.workers.failures import FailureMonitor
from basis_rl.rewards.workers.pool import Outcome, WorkerPool
from basis_rl.sandbox import Policy, python_paths

OnError = Literal["raise", "unscored"]

# Wall-clock limit of a call, as a multiple of its CPU time: on a loaded machine, other processes may get nine of ten
# seconds.
WALL_CLOCK = 10.0
# Address space on top of the caller's limit: imports reserve far more of it than they use.
_IMPORT_BYTES = 4 << 30
_FOLDER_BYTES = 64 << 20
# Threads of one worker: numerical libraries start some when they are imported.
_THREADS = 16


class FunctionError(RuntimeError):
    """The user's reward function raised, or returned something other than a number or None. Has the traceback."""


def _ending(outcome: Outcome) -> Literal["ok", "timeout", "memory", "failed", "error"]:
    """How a call ended; ``failed`` is a failure of the infrastructure (`Outcome.failed`)."""
    if outcome.failed:
        return "failed"
    if outcome.status == "timeout":
        return "timeout"
    return "memory" if "memory" in outcome.value else "error" if "error" in outcome.value else "ok"


class Calls:
    """A function that is called in up to `num_workers` processes, with JSON arguments, and returns numbers or None.

    Args:
        name: of the reward, in its metrics.
        target: ``module:name`` or ``module.name``, which is also looked for in the working directory, or
            ``/path/of/file.py:name``.
        num_workers: processes (of this rank), which start with the first call.
        timeout: seconds of CPU time for one call.
        memory_bytes: address space that a worker may take beyond its imports.
        wall_timeout: seconds by the clock, for calls that sleep; default: ten times `timeout`.
        over_limit: value of a call that ran out of time or memory.
        shut_in: run the workers in the sandbox (`basis_rl.sandbox`), without network and without writing, for functions
            that execute what a model wrote.
        env: names of the environment variables that the workers have besides paths and language, if not `shut_in`.

    Raises:
        ValueError: a variable is not set.
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
        env: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.target = target
        self.over_limit = over_limit
        worker = Path(__file__).with_name("call_worker.py")
        # -P keeps the script's folder off sys.path, where its modules would shadow packages of the same name.
        command = [sys.executable, "-P", str(worker), target, str(timeout), str(memory_bytes)]
        policy = worker_policy(memory_bytes + _IMPORT_BYTES, _THREADS) if shut_in else None
        wall = WALL_CLOCK * timeout if wall_timeout is None else wall_timeout
        self._env = variables(f"{name}: env", env)
        self._what = f"The reward function '{Path(target).name}'"
        self._pool = WorkerPool(command, num_workers, wall, policy=policy, env=self._env, name=self._what)
        self._failures = FailureMonitor(name=self._what)

    def describe(self) -> dict[str, Any]:
        """Parameters and version of the function, as a worker reports them.

        Raises:
            ValueError: it cannot be imported; with the traceback.
        """
        found = self._pool.run([{"describe": True}])[0].value
        if "error" in found or not found:
            why = without_values(found.get("error", "its process died"), self._env)
            raise ValueError(f"'{self.target}' cannot be imported:\n{why}")
        return found

    def run(
        self,
        calls: Sequence[tuple[Sequence[Any], dict[str, Any]]],
        log_metric: LogMetric = None,
        on_error: OnError | None = None,
    ) -> Scores:
        """The scores of ``(args, kwargs)``, in order; None for a call that failed.

        Logs shares of the calls: ``reward/NAME/timeout``, ``.../memory``, ``.../infrastructure`` (``failed``), and with
        `on_error` also ``.../error``.

        Args:
            calls: arguments of each call.
            log_metric: as TRL hands it over.
            on_error: ``unscored`` gives None to calls that raised, unless all of them did. Otherwise the first
                exception is raised.

        Raises:
            FunctionError: see `on_error`.
            RewardInfrastructureError: too many of the recent calls failed (`FailureMonitor`).
        """
        outcomes = self._pool.run([{"args": list(args), "kwargs": kwargs} for args, kwargs in calls])
        endings = [_ending(outcome) for outcome in outcomes]
        count = Counter(endings)
        why = ", ".join(sorted({outcome.status for outcome in outcomes if outcome.failed}))
        self._failures.record(len(outcomes) - count["failed"], count["failed"], why)
        shares = {"timeout": count["timeout"], "memory": count["memory"], "infrastructure": count["failed"]}
        shares |= {"error": count["error"]} if on_error else {}
        log_shares(log_metric, self.name, shares, len(outcomes))
        if count["error"] and (on_error != "unscored" or count["error"] == len(outcomes)):
            first = without_values(outcomes[endings.index("error")].value["error"], self._env)
            raise FunctionError(
                f"{self._what} failed on {count['error']} of {len(outcomes)} rollouts. The first one:\n{first}"
            )
        scores: dict[str, float | None] = dict.fromkeys(("timeout", "memory"), self.over_limit)
        return [scores.get(end, outcome.value.get("value")) for end, outcome in zip(endings, outcomes, strict=True)]

    def close(self) -> None:
        """End the processes; they also end with the object, and with the program."""
        self._pool.close()


def worker_policy(memory_bytes: int, processes: int) -> Policy:
    """What a worker in a sandbox may do: read what Python reads, and write into its temporary folder."""
    return Policy(
        memory_bytes=memory_bytes,
        file_bytes=_FOLDER_BYTES,
        folder_bytes=_FOLDER_BYTES,
        processes=processes,
        readable=python_paths(),
    )


def trl_signature(columns: Sequence[str]) -> inspect.Signature:
    """The signature of a reward function that reads these columns, which the trainer's checks inspect."""
    known = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("prompts", "completions")]
    read = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys(columns)]
    return inspect.Signature([*known, *read, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])
