"""The reward of verifiable mathematics: is the last boxed answer the gold one, by Math-Verify?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from basis_rl.rewards.extract import completion_text, last_boxed, plain_number
from basis_rl.rewards.failures import FailureMonitor
from basis_rl.rewards.pool import WorkerPool
from basis_rl.sandbox import Policy, python_paths

_MEMORY_BYTES = 4 << 30
_WALL_CLOCK = 10.0  # times the CPU time: nine of ten processor seconds may go to others
# Of this package; raised with every change of what counts as right, so that two gradings are never mixed.
_RULES = 2
_REMEMBERED = 200_000


class MathVerifyReward:
    r"""1.0 if the last balanced ``\boxed{...}`` of the completion equals the gold answer, else 0.0.

    Equal is what Math-Verify finds equal, and numerals of the same value (`plain_number`).

    A reward function as TRL knows them; it reads the dataset's ``solution`` column. The gold is the content of its own
    last ``\boxed{}`` where it has one, else the whole text, and is given to Math-Verify inside a box (bare LaTeX golds
    fail against themselves). Grading runs in processes without network, rights and secrets (`basis_rl.sandbox`) that
    are killed when they hang, so this never raises for what a model wrote, and never hangs: an answer that takes more
    than `timeout` seconds of CPU time counts as wrong, on a loaded machine no sooner than on an idle one.

    A rollout is not scored (None; the trainer gives it advantage 0) when its gold cannot be parsed, or when the grading
    failed: the worker died twice on it, or did not get its CPU time (`Outcome.failed`).

    Metrics, where the trainer passes ``log_metric``: ``reward/no_box``, ``reward/timeout`` and
    ``reward/infrastructure`` (the grading failed), shares of the rollouts.

    Args:
        num_workers: grading processes (of this rank).
        timeout: seconds of CPU time for one answer.

    Raises:
        ValueError: a parameter out of its range.
        RewardInfrastructureError: when called, if the grading of more than 5 % of the recent rollouts failed
            (`FailureMonitor`), or no worker can be started.
    """

    __name__ = "math_verify_reward"

    def __init__(self, num_workers: int = 2, timeout: float = 5.0) -> None:
        if num_workers < 1 or timeout <= 0:
            raise ValueError(f"MathVerifyReward needs num_workers >= 1 and timeout > 0, got {num_workers}, {timeout}.")
        self.version = f"math-verify {version('math-verify')}, rules {_RULES}"
        worker = Path(__file__).with_name("worker.py")
        # -P: the script's folder stays off the path, where this very file would shadow the package math_verify
        command = [sys.executable, "-P", str(worker), str(timeout), str(_MEMORY_BYTES)]
        policy = Policy(
            memory_bytes=_MEMORY_BYTES,
            cpu_seconds=None,
            file_bytes=1 << 26,
            processes=1,
            folder=None,
            readable=python_paths(),
        )
        self._pool = WorkerPool(command, num_workers, _WALL_CLOCK * timeout, cpu_timeout=timeout, policy=policy)
        self._failures = FailureMonitor(name="The grading by Math-Verify")
        self._too_hard: set[tuple[str, str]] = set()
        self._verdicts: dict[tuple[str, str], bool | None] = {}

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str | list[dict[str, str]]],
        solution: Sequence[str],
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        answers = [last_boxed(completion_text(completion)) for completion in completions]
        rewards, timeouts, failed = self._grade([gold_answer(gold) for gold in solution], answers)
        if log_metric is not None and answers:
            log_metric("reward/no_box", sum(answer is None for answer in answers) / len(answers))
            log_metric("reward/timeout", timeouts / len(answers))
            log_metric("reward/infrastructure", len(failed) / len(answers))
        self._failures.record(len(answers) - len(failed), len(failed))
        return rewards

    def check_golds(self, solution: Sequence[str]) -> list[int]:
        """Indices of the golds that do not verify against themselves: no answer to them could ever be right."""
        golds = [gold_answer(gold) if isinstance(gold, (str, int, float)) else "" for gold in solution]
        rewards, _, failed = self._grade(golds, list(golds))
        self._failures.record(len(golds) - len(failed), len(failed))
        wrong = {i for i, reward in enumerate(rewards) if reward != 1.0} - failed  # of those nothing is known
        return [i for i, gold in enumerate(golds) if i in wrong or gold.lower() in ("none", "nan", "null")]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the two answers of each pair, contents of boxes, are the same one, by the rules of the grading."""
        rewards, _, failed = self._grade([a for a, _ in pairs], [b for _, b in pairs])
        self._failures.record(len(pairs) - len(failed), len(failed))
        return [reward == 1.0 for reward in rewards]

    def close(self) -> None:
        """End the grading processes; they also end with the object, and with the program."""
        self._pool.close()

    def _grade(self, golds: list[str], answers: Sequence[str | None]) -> tuple[list[float | None], int, set[int]]:
        """Rewards, how many answers were too hard, and the indices of those whose grading failed."""
        pairs = [(gold, answer) for gold, answer in zip(golds, answers, strict=True) if answer is not None]
        new = list(dict.fromkeys(pair for pair in pairs if pair not in self._verdicts))
        outcomes = self._pool.run([{"gold": gold, "answer": answer} for gold, answer in new]) if new else []
        failed: set[tuple[str, str]] = set()
        for pair, outcome in zip(new, outcomes, strict=True):
            if outcome.status == "ok":
                verdict = outcome.value["verdict"]
                self._verdicts[pair] = _same_number(*pair) if verdict is False else verdict
            elif outcome.failed:  # not the answer's doing: not remembered
                failed.add(pair)
            else:
                self._verdicts[pair] = False
                self._too_hard.add(pair)
        rewards: list[float | None] = []
        for gold, answer in zip(golds, answers, strict=True):
            if answer is None:
                rewards.append(0.0)
                continue
            verdict = self._verdicts.get((gold, answer))
            rewards.append(None if verdict is None else float(verdict))
        timeouts = sum(pair in self._too_hard for pair in pairs)
        if len(self._verdicts) > _REMEMBERED:
            self._verdicts.clear()
            self._too_hard.clear()
        return rewards, timeouts, {i for i, pair in enumerate(zip(golds, answers, strict=True)) if pair in failed}


def _same_number(gold: str, answer: str) -> bool:
    """Both are numerals of the same value. Math-Verify misses ``870000000`` for ``8.7 \\times 10^8``, and ``1e-3``."""
    value = plain_number(gold)
    return value is not None and value == plain_number(answer)


def gold_answer(solution: str) -> str:
    """The gold answer in a ``solution`` cell: its last box, or all of it."""
    boxed = last_boxed(str(solution))
    return boxed if boxed is not None else str(solution).strip()
