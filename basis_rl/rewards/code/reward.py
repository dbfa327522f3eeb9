"""The reward of code: does it pass the tests of its problem, in a sandbox?"""

from __future__ import annotations

import math
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from basis_rl.rewards.base import Column, Completions, LogMetric, Reward, Scores, log_shares, warn_late
from basis_rl.rewards.code.blocks import last_code
from basis_rl.rewards.code.run import Program, Verdict
from basis_rl.rewards.code.tests import Case, choose_cases, joined, parse_tests
from basis_rl.rewards.extract import completion_text
from basis_rl.rewards.workers.calls import check_limits, trl_signature
from basis_rl.rewards.workers.failures import RewardInfrastructureError
from basis_rl.sandbox import Policy, isolation

_RULES = 2
_OUTPUT_BYTES = 4 << 20


class CodeReward(Reward):
    """1.0 if the rollout's Python code passes all tests of its problem, else 0.0.

    The code is the last closed fenced block of Python, else the last one without a language that is Python. The tests
    are a column of the dataset, in the forms of `parse_tests`. Each test runs in a sandbox of its own, which never
    holds what is expected (docs/security.md). A problem whose tests cannot be read, or that pass or need something that
    is not plain data, is not scored (None).

    Metrics: ``reward/code/no_code``, ``reward/code/timeout``, ``reward/code/unscored`` and, of these,
    ``reward/code/over_budget``, shares of the rollouts.

    Args:
        column: with the tests. The trainer's data loading also needs a ``solution``, which may be the same column.
        partial: the share of tests passed instead of all or nothing. Slower: otherwise the first failure ends a
            rollout.
        max_tests: per problem, spread evenly over them; the first ones alone are often shown to the model.
        num_workers: rollouts tested at a time, on this rank.
        timeout: seconds of CPU time per test; the clock allows three times that and 3 s, so leave a processor per
            worker.
        memory_bytes: address space per test.
        processes: processes and threads that a program may have.
        packages: allow the import of all installed packages, besides the standard library and numpy.
        tolerance: absolute or relative error of a number that is expected with a decimal point.
        fn_name: column with the function's name, where the tests do not name it.
        batch_timeout: seconds by the clock for the rollouts of one call; the rest is not scored. None: no limit.
        allow_unsafe: run the code although this machine does not keep all promises of the sandbox.

    Raises:
        ValueError: a parameter out of its range, or a machine that cannot isolate or run the code.
        RewardInfrastructureError: when called: the sandbox cannot be set up any more.
    """

    __name__ = "code_reward"
    gold_help = (
        "The reward code reads tests: name their column by reward_kwargs: {column: test_list}, and where they leave it "
        "out that of the function's name, {column: test, fn_name: entry_point}."
    )
    reward_range = (0.0, 1.0)

    def __init__(
        self,
        column: str = "solution",
        partial: bool = False,
        max_tests: int = 32,
        num_workers: int = 4,
        timeout: float = 5.0,
        memory_bytes: int = 1 << 30,
        processes: int = 4,
        packages: bool = False,
        tolerance: float = 1e-6,
        fn_name: str | None = None,
        batch_timeout: float | None = 300.0,
        allow_unsafe: bool = False,
    ) -> None:
        check_limits("code", num_workers, timeout, memory_bytes, batch_timeout)
        if max_tests < 1 or processes < 1 or tolerance < 0:
            raise ValueError(
                f"code: needs max_tests >= 1, processes >= 1 and tolerance >= 0, got {max_tests}, {processes}, "
                f"{tolerance}."
            )
        given = isolation()
        if not allow_unsafe and not given.complete:
            raise ValueError(
                f"code: this machine cannot shut in what a model writes: {given}. Run on Linux 5.13 or newer, with "
                "Landlock and seccomp, or set allow_unsafe: true where nothing can be lost or read that matters."
            )
        self.column = column
        self.partial = partial
        self.max_tests = max_tests
        self.fn_name = fn_name
        self.batch_timeout = batch_timeout
        self.num_workers = int(num_workers)
        self._policy = Policy(
            memory_bytes=memory_bytes, cpu_seconds=timeout, file_bytes=_OUTPUT_BYTES, processes=processes, readable=()
        )
        self._packages = packages
        self._tolerance = tolerance
        kind = "share of" if partial else "all of"
        self.version = (
            f"rules {_RULES}, Python {platform.python_version()}, {kind} {max_tests} tests, {timeout:g} s, "
            f"{memory_bytes >> 20} MiB{', packages' if packages else ''}, tolerance {tolerance:g}"
        )
        self.__signature__ = trl_signature([column, *([fn_name] if fn_name else [])])
        broken = self._broken_sandbox()
        if broken:
            raise ValueError(broken)

    def __call__(
        self, prompts: Column, completions: Completions, log_metric: LogMetric = None, **columns: Any
    ) -> Scores:
        names = columns[self.fn_name] if self.fn_name else [None] * len(completions)
        codes = [last_code(completion_text(completion)) for completion in completions]
        rows = list(zip(codes, columns[self.column], names, strict=True))
        # The same program with the same tests is run once.
        keys = [repr(row) for row in rows]
        tasks = dict(zip(keys, rows, strict=True))
        deadline = math.inf if self.batch_timeout is None else time.monotonic() + self.batch_timeout
        with ThreadPoolExecutor(self.num_workers) as threads:
            scored = threads.map(lambda task: self._score(deadline, *task), tasks.values())
            done = dict(zip(tasks, scored, strict=True))
        results = [done[key] for key in keys]
        if any("no sandbox" in verdicts for _, verdicts in results):
            broken = self._broken_sandbox()
            # Or else it was the code that ended in the way of a failed sandbox.
            if broken:
                raise RewardInfrastructureError(broken)
        rewards = [reward for reward, _ in results]
        late = sum("over budget" in verdicts for _, verdicts in results)
        timeouts = sum("timeout" in verdicts for _, verdicts in results)
        counts = {"no_code": codes.count([]), "timeout": timeouts, "unscored": rewards.count(None), "over_budget": late}
        log_shares(log_metric, "code", counts, len(results))
        warn_late("The tests", late, len(results), self.batch_timeout)
        return rewards

    def answers(self, completions: Completions, prompts: Column = ()) -> list[str | None]:
        """The program of each rollout; None where there is none."""
        return [next(iter(last_code(completion_text(completion))), None) for completion in completions]

    @property
    def gold_columns(self) -> list[str]:
        """The column with the tests, and that of the function's name if there is one."""
        return [self.column, *([self.fn_name] if self.fn_name else [])]

    def check_golds(self, solution: Column, names: Column | None = None) -> list[int]:
        """Indices of the cells that hold no tests, or tests of a function whose name is not known."""
        rows = zip(solution, names or [None] * len(solution), strict=True)
        return [i for i, (cell, name) in enumerate(rows) if not self._cases(cell, name)]

    def _cases(self, cell: Any, name: str | None) -> list[Case]:
        return choose_cases(parse_tests(cell, name), self.max_tests)

    def _score(
        self, deadline: float, code: list[str], cell: Any, name: str | None
    ) -> tuple[float | None, list[Verdict]]:
        cases = self._cases(cell, name)
        if not cases:
            return None, []
        if not code:
            return 0.0, []
        cases = cases if self.partial else joined(cases)
        verdicts: list[Verdict] = []
        with self._program(code, deadline) as program:
            for case in cases:
                verdicts.append(program.test(case))
                if verdicts[-1] != "pass" and not self.partial:
                    break
        if "unsupported" in verdicts or "over budget" in verdicts:
            return None, verdicts
        passed = verdicts.count("pass")
        return passed / len(cases) if self.partial else float(passed == len(cases)), verdicts

    def _program(self, code: list[str], deadline: float = math.inf) -> Program:
        return Program(code, self._policy, self._packages, self._tolerance, deadline)

    def _broken_sandbox(self) -> str:
        """What is wrong when two programs that must pass do not; empty if they do."""
        with self._program(["def f(x):\n    return x + 1\nprint(2)\n"]) as program:
            found = [program.test(Case("stdin", "", "2")), program.test(Case("assert", "assert f(1) == 2"))]
        if found == ["pass", "pass"]:
            return ""
        return (
            f"code: the sandbox fails the simplest programs ({', '.join(found)}; {isolation()}). Are memory_bytes "
            "and timeout enough for an interpreter, and can it be read by others than its owner?"
        )
