"""The reward of a user's own function, called in worker processes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from basis_rl.registry import OneOrMore, Positive, checked
from basis_rl.rewards.base import GIVEN, Column, Completions, LogMetric, Reward, Scores
from basis_rl.rewards.extract import completion_text
from basis_rl.rewards.source import arguments_version
from basis_rl.rewards.workers.calls import Calls, OnError, trl_signature

_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_log = logging.getLogger(__name__)


class FunctionReward(Reward):
    """What a function says of each rollout: ``f(completion: str, **row) -> float | None``, one rollout per call.

    It runs in processes of its own, since it may hang, crash or run out of memory. It is given the rollout's text (of a
    conversation the last assistant message), and by name the columns that it has parameters for, ``prompt`` among them,
    or all with ``**row``. None leaves the rollout unscored. The workers have a minimal environment, with the variables
    in `env`, and the working directory on their path; they can use network and files. In a recipe this is
    ``pool:my_lib.rewards:mine``.

    Metrics: ``reward/NAME/timeout``, ``.../memory``, ``.../infrastructure`` and ``.../error``, shares of the rollouts.

    Args:
        function: ``module:name`` or ``module.name``.
        num_workers: processes of this rank.
        timeout: seconds of CPU time for one rollout, so that a loaded machine changes no score.
        wall_timeout: seconds by the clock, for functions that wait for something; default: ten times `timeout`.
        memory_bytes: address space beyond what its imports take.
        over_limit: score of a call that ran out of time or memory; None leaves it unscored, 0 makes the rollout wrong.
        on_error: ``raise`` ends the run with the function's traceback; ``unscored`` counts it and continues, but raises
            where every call of a batch failed.
        env: names of environment variables that the workers have too: keys, addresses, HTTPS_PROXY. Their values are in
            no recipe, log or card.
        arguments: further arguments of the function, by name.

    Raises:
        ValueError: the function cannot be imported, takes no rollout or not these arguments, a variable is not set, or
            a parameter is out of its range.
        FunctionError, RewardInfrastructureError: when called: see `on_error` and `FailureMonitor`.
    """

    @checked("pool")
    def __init__(
        self,
        function: str,
        num_workers: OneOrMore = 2,
        timeout: Positive = 5.0,
        wall_timeout: Positive | None = None,
        memory_bytes: OneOrMore = 4 << 30,
        over_limit: float | None = None,
        on_error: OnError = "raise",
        env: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(function, str) or not re.fullmatch(r"[\w.]+[.:]\w+", function):
            raise ValueError(f"A function in the pool is named `module:function`, got {function!r}.")
        self.function = function
        self.over_limit = over_limit
        self.on_error = on_error
        self.__name__ = re.split("[.:]", function)[-1]
        self.arguments = dict(arguments or {})
        self._calls = Calls(
            self.__name__, function, num_workers, timeout, memory_bytes, wall_timeout, over_limit, env=env
        )
        if proxies := [name for name in _PROXIES if name in os.environ and name not in env]:
            _log.warning("%s: %s is not in `env`, so the processes of this reward use no proxy.", function, proxies[0])
        known = self._calls.describe()
        if not known["first"] or known["asynchronous"]:
            raise ValueError(f"'{function}' must be a plain function whose first parameter is the rollout's text.")
        self._wanted: set[str] | None = None if known["any"] else set(known["parameters"])
        unknown = [] if self._wanted is None else sorted(self.arguments.keys() - self._wanted)
        if unknown:
            raise ValueError(f"arguments: '{function}' has no parameter '{unknown[0]}', only {known['parameters']}.")
        self.reads: list[str] = [name for name in known["parameters"] if name not in self.arguments]
        self.version = f"{known['version']}, over limit {over_limit}"
        if self.arguments:
            self.version += f", {arguments_version(self.arguments)}"
        self.__signature__ = trl_signature(
            [name for name in known["required"] if name in self.reads and name != "prompt"]
        )

    def __call__(
        self, prompts: Column, completions: Completions, log_metric: LogMetric = None, **columns: Any
    ) -> Scores:
        rows = {
            "prompt": prompts,
            **{name: column for name, column in columns.items() if name == "truncated" or name not in GIVEN},
        }
        wanted = [name for name in rows if self._wanted is None or name in self._wanted]
        texts = [completion_text(completion) for completion in completions]
        calls = [([text], {name: rows[name][i] for name in wanted} | self.arguments) for i, text in enumerate(texts)]
        return self._calls.run(calls, log_metric, self.on_error)
