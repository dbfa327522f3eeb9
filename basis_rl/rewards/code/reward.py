"""The reward of code: does it pass the tests of its problem, in a sandbox?"""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from basis_rl.registry import NotNegative, OneOrMore, Positive, checked
from basis_rl.rewards.base import Column, Completions, LogMetric, Scores, log_shares, warn_late
from basis_rl.rewards.code.blocks import last_code
from basis_rl.rewards.code.run import Program, Verdict
from basis_rl.rewards.code.tests import Case, choose_cases, joined, parse_tests
from basis_rl.rewards.thought import AfterThought, Unfinished
from basis_rl.rewards.workers.calls import trl_signature
from basis_rl.rewards.workers.failures import RewardInfrastructureError
from basis_rl.sandbox import Policy, isolation

_RULES = 6
_OUTPUT_BYTES = 4 << 20

_Scored = tuple[float | None, list[Verdict]]
# The hash of a row, whose tests can be large, and the program.
_Key = tuple[int, str]


class CodeReward(AfterThought):
    """1.0 if the rollout's Python code passes all tests of its problem, else 0.0.

    The code is the last closed fenced block of Python, else the last one without a language that is Python. The tests
    are a column of the dataset, in the forms of `parse_tests`. Each test runs in a sandbox of its own, which never
    holds what is expected (docs/security.md). A problem is not scored (None) if its tests cannot be read, need
    something that is not plain data, or call several functions of the program, which could then be its own judge.

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
        tolerance: absolute or relative error of a number that is expected with a decimal point, never more than a tenth
            of the number.
        fn_name: column with the function's name, where the tests do not name it.
        batch_timeout: seconds by the clock for the rollouts of one call, which have equal shares of it. Those that are
            not done within theirs are not scored. None: no limit.
        allow_unsafe: run the code although this machine does not keep all promises of the sandbox.
        after_think, unfinished: see `AfterThought`.

    Raises:
        ValueError: a parameter out of its range, or a machine that cannot isolate or run the code.
        RewardInfrastructureError: when called: the sandbox cannot be set up any more.
    """

    __name__ = "code_reward"
    gold_help = (
        "The reward code reads tests: name their column by reward_kwargs: {column: test_list}, and where they leave it "
        "out that of the function's name, {column: test, fn_name: entry_point}. See docs/other_rewards.md."
    )
    reward_range = (0.0, 1.0)
    place = "code"

    @checked("code")
    def __init__(
        self,
        column: str = "solution",
        partial: bool = False,
        max_tests: OneOrMore = 32,
        num_workers: OneOrMore = 4,
        timeout: Positive = 5.0,
        memory_bytes: OneOrMore = 1 << 30,
        processes: OneOrMore = 4,
        packages: bool = False,
        tolerance: NotNegative = 1e-6,
        fn_name: str | None = None,
        batch_timeout: Positive | None = 300.0,
        allow_unsafe: bool = False,
        after_think: bool | None = None,
        unfinished: Unfinished = "wrong",
    ) -> None:
        given = isolation()
        if not allow_unsafe and not given.complete:
            raise ValueError(
                f"code: this machine cannot shut in what a model writes: {given}. Run on Linux 5.13 or newer, with "
                "Landlock and seccomp, or set allow_unsafe: true where nothing can be lost or read that matters."
            )
        self._set_thought(after_think, unfinished)
        self.column = column
        self.partial = partial
        self.max_tests = max_tests
        self.fn_name = fn_name
        self.batch_timeout = batch_timeout
        self.num_workers = num_workers
        self._policy = Policy(
            memory_bytes=memory_bytes, cpu_seconds=timeout, file_bytes=_OUTPUT_BYTES, processes=processes, readable=()
        )
        self._packages = packages
        # By the hash of a row: whether its tests can score code.
        self._fit: dict[int, bool] = {}
        self._tolerance = tolerance
        kind = "share of" if partial else "all of"
        self._stated = (
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
        codes = [last_code(text) for text in self.said(completions, prompts, columns.get("truncated"))]
        rows = list(zip(columns[self.column], names, prompts or [None] * len(completions), strict=True))
        cases = self._cases(rows)
        # The same program with the same tests is run once.
        keys = [(hash(repr(row)), repr(code)) for row, code in zip(rows, codes, strict=True)]
        tasks = dict(zip(keys, zip(codes, cases, strict=True), strict=True))
        done: dict[_Key, _Scored] = {}
        end = math.inf if self.batch_timeout is None else time.monotonic() + self.batch_timeout
        with ThreadPoolExecutor(self.num_workers) as threads:
            # What a rollout uses up is not another's time: it has an equal share of what is left when it begins. Those
            # that were not done are tested again, if others have left time.
            for _ in range(2):
                left = [key for key in tasks if key not in done or "over budget" in done[key][1]]
                begun = itertools.count()

                def scored(key: _Key, begun: Iterator[int] = begun, count: int = len(left)) -> _Scored:
                    share = self.num_workers / max(self.num_workers, count - next(begun))
                    return self._score(share * (end - time.monotonic()), *tasks[key])

                done.update(zip(left, threads.map(scored, left), strict=True))
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
        return self._settled(rewards, [code or None for code in codes], columns.get("truncated"))

    def _answer(self, text: str) -> str | None:
        return next(iter(last_code(text)), None)

    @property
    def gold_columns(self) -> list[str]:
        """The column with the tests, that of the function's name if there is one, and the prompts."""
        return [self.column, *([self.fn_name] if self.fn_name else []), "prompt"]

    def check_golds(self, solution: Column, *others: Column) -> list[int]:
        """Indices of the cells that hold no tests, or tests by which no code can be scored.

        The tests are run without a program. `others` are the other `gold_columns`, the last of which may be left out.
        """
        columns = others if self.fn_name else ([None] * len(solution), *others)
        cases = self._cases(list(zip(solution, *columns, strict=True)))
        return [index for index, found in enumerate(cases) if not found]

    def _cases(self, rows: list[tuple[Any, ...]]) -> list[list[Case]]:
        """The tests of each row (`parse_tests` takes it); none where code cannot be scored by them, tried out once."""
        keys = [hash(repr(row)) for row in rows]
        cases: dict[int, list[Case]] = {}
        for key, row in dict(zip(keys, rows, strict=True)).items():
            chosen = choose_cases(parse_tests(*row), self.max_tests)
            cases[key] = chosen if self.partial else joined(chosen)
        untried = {k: found for k, found in cases.items() if found and found[0].kind == "assert" and k not in self._fit}
        with self._program([""]) as nothing:
            self._fit.update(zip(untried, nothing.score_nothing(list(untried.values())), strict=True))
        return [cases[key] if self._fit.get(key, True) else [] for key in keys]

    def _score(self, seconds: float, code: list[str], cases: list[Case]) -> _Scored:
        if not cases:
            return None, []
        if not code:
            return 0.0, []
        verdicts: list[Verdict] = []
        with self._program(code, time.monotonic() + seconds) as program:
            for case in cases:
                verdicts.append(program.test(case))
                if verdicts[-1] != "pass" and (not self.partial or verdicts[-1] == "over budget"):
                    break
        if "over budget" in verdicts:
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
