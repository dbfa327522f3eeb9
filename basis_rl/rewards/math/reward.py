"""The reward of verifiable mathematics: is the last boxed answer the gold one, by Math-Verify?"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from basis_rl.rewards.base import Column, Completions, LogMetric, Reward, Scores, log_shares
from basis_rl.rewards.extract import completion_text, last_boxed
from basis_rl.rewards.math.cache import Pair, Verdict, Verdicts
from basis_rl.rewards.math.quick import quick_verdict, same_text
from basis_rl.rewards.math.rules import RULES, refused
from basis_rl.rewards.math.screen import screened
from basis_rl.rewards.workers.calls import WALL_CLOCK
from basis_rl.rewards.workers.failures import FailureMonitor
from basis_rl.rewards.workers.pool import Outcome, WorkerPool
from basis_rl.sandbox import Policy, python_paths

_MEMORY_BYTES = 4 << 30
_METRICS: dict[str, Verdict] = {"screened": "screened", "timeout": "timeout", "infrastructure": "failed"}


class MathVerifyReward(Reward):
    r"""1.0 if the last balanced ``\boxed{...}`` of the rollout equals the gold answer, else 0.0.

    Equal is what Math-Verify finds equal, but for the few notations that docs/rewards.md lists. The gold's own text,
    plain numerals and single letters are compared here (`quick_verdict`), what is far too large or too deep for the
    gold is wrong unseen (`screened`), and only the rest goes to a worker, each pair once.

    A reward function as TRL knows them; it reads the dataset's ``solution`` column. The gold is the content of its own
    last ``\boxed{}`` where it has one, else the whole text, and is given to Math-Verify inside a box (bare LaTeX golds
    fail against themselves). A cell that is a list holds several golds, and an answer that equals one of them is right;
    where all of several numbers are asked for, they are one gold, ``1, 2, 5``.

    Grading runs in processes without network, rights and secrets (`basis_rl.sandbox`) that are killed when they hang,
    so this never raises for what a model wrote, and never hangs: an answer that takes more than `timeout` seconds of
    CPU time counts as wrong, on a loaded machine no sooner than on an idle one. A rollout is not scored (None; the
    trainer gives it advantage 0) when no gold of it can be parsed, or when the grading failed: the worker died twice on
    it, or did not get its CPU time (`Outcome.failed`).

    Metrics, where the trainer passes ``log_metric``: ``reward/no_box``, ``reward/screened``, ``reward/timeout`` and
    ``reward/infrastructure`` (the grading failed), shares of the rollouts.

    Args:
        num_workers: grading processes (of this rank).
        timeout: seconds of CPU time for one answer.
        allow: names of the acceptances of Math-Verify that are kept (`basis_rl.rewards.math.rules.QUIRKS`); a verdict
            that rests on another one is wrong. None: all of them.

    Raises:
        ValueError: a parameter out of its range, or an unknown name.
        RewardInfrastructureError: when called, if the grading of more than 5 % of the recent rollouts failed
            (`FailureMonitor`), or no worker can be started.
    """

    __name__ = "math_verify_reward"

    def __init__(self, num_workers: int = 2, timeout: float = 5.0, allow: Collection[str] | None = None) -> None:
        if num_workers < 1 or timeout <= 0:
            raise ValueError(f"MathVerifyReward needs num_workers >= 1 and timeout > 0, got {num_workers}, {timeout}.")
        self.refused = refused([allow] if isinstance(allow, str) else allow)
        self.version = f"math-verify {version('math-verify')}, rules {RULES}"
        if self.refused:
            self.version += f", without {', '.join(self.refused)}"
        worker = Path(__file__).with_name("worker.py")
        # -P: the folder of the script stays off the path, where its files could shadow other modules
        command = [sys.executable, "-P", str(worker), str(timeout)]
        policy = Policy(memory_bytes=_MEMORY_BYTES, file_bytes=1 << 26, processes=1, readable=python_paths())
        self._pool = WorkerPool(command, num_workers, WALL_CLOCK * timeout, cpu_timeout=timeout, policy=policy)
        self._failures = FailureMonitor(name="The grading by Math-Verify")
        self._verdicts = Verdicts()

    def __call__(
        self, prompts: Column, completions: Completions, solution: Column, log_metric: LogMetric = None, **kwargs: Any
    ) -> Scores:
        answers = [last_boxed(completion_text(completion)) for completion in completions]
        rows = [
            [] if answer is None else [(gold, answer) for gold in gold_answers(cell)]
            for cell, answer in zip(solution, answers, strict=True)
        ]
        graded = self._grade([pair for row in rows for pair in row])
        verdicts = [{graded[pair] for pair in row} for row in rows]
        counts = {name: sum(verdict in row for row in verdicts) for name, verdict in _METRICS.items()}
        log_shares(log_metric, "", {"no_box": answers.count(None), **counts}, len(answers))
        self._record(verdicts)
        return [_reward(row) for row in verdicts]

    def check_golds(self, solution: Column) -> list[int]:
        """Indices of the golds that do not verify against themselves: no answer to them could ever be right.

        Of a list of golds none does. Those whose grading failed are not among them.
        """
        golds = [gold_answers(cell) for cell in solution]
        graded = self._grade([(gold, gold) for row in golds for gold in row], check=True)
        verdicts = [{"wrong" if _is_missing(gold) else graded[gold, gold] for gold in row} for row in golds]
        self._record(verdicts)
        return [i for i, row in enumerate(verdicts) if row.isdisjoint({"right", "failed"})]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the two answers of each pair, contents of boxes, are the same one, by the rules of the grading."""
        graded = self._grade(pairs)
        self._record([{graded[pair]} for pair in pairs])
        return [graded[pair] == "right" for pair in pairs]

    def close(self) -> None:
        """End the grading processes; they also end with the object, and with the program."""
        self._pool.close()

    def _record(self, verdicts: Sequence[set[Verdict]]) -> None:
        failed = sum("failed" in row and "right" not in row for row in verdicts)
        self._failures.record(len(verdicts) - failed, failed)

    def _grade(self, pairs: Sequence[Pair], check: bool = False) -> dict[Pair, Verdict]:
        """Verdicts of all pairs. With `check` a worker is asked even where the two are the same text."""
        graded: dict[Pair, Verdict] = {}
        asked: list[Pair] = []
        for pair in dict.fromkeys(pairs):
            right = self._quick(pair, check)
            if right is not None:
                graded[pair] = "right" if right else "wrong"
            elif screened(*pair) is not None:
                graded[pair] = "screened"
            else:
                asked.append(pair)
        graded.update(self._verdicts.find(asked))
        new = [pair for pair in asked if pair not in graded]
        options = {"refuse": list(self.refused)} if self.refused else {}
        outcomes = self._pool.run([{"gold": gold, "answer": answer, **options} for gold, answer in new]) if new else []
        fresh = {pair: _verdict(outcome) for pair, outcome in zip(new, outcomes, strict=True)}
        # What failed is not the answer's doing, and may go well the next time.
        self._verdicts.remember({pair: verdict for pair, verdict in fresh.items() if verdict != "failed"})
        return {**graded, **fresh}

    def _quick(self, pair: Pair, check: bool) -> bool | None:
        if not check and same_text(*pair):
            return True
        return quick_verdict(*pair, any_case="case" not in self.refused)


def _verdict(outcome: Outcome) -> Verdict:
    if outcome.status == "timeout" or outcome.failed:
        return "failed" if outcome.failed else "timeout"
    right = outcome.value.get("verdict", False)  # a grading that fails, for want of memory too, is a wrong answer
    return "no_gold" if right is None else "right" if right else "wrong"


def _reward(verdicts: set[Verdict]) -> float | None:
    """Of an answer that was graded against several golds; against none if it has no box."""
    if "right" in verdicts:
        return 1.0
    return None if "failed" in verdicts or verdicts == {"no_gold"} else 0.0


def _is_missing(gold: str) -> bool:
    return gold.lower() in ("none", "nan", "null")


def gold_answer(solution: str) -> str:
    """The gold answer in a ``solution`` cell: its last box, or all of it."""
    boxed = last_boxed(str(solution))
    return boxed if boxed is not None else str(solution).strip()


def gold_answers(cell: Any) -> tuple[str, ...]:
    """The accepted answers in a ``solution`` cell, one or a list; the empty text, which nothing equals, for no text."""
    if isinstance(cell, (list, tuple)):
        return tuple(dict.fromkeys(gold for each in cell for gold in gold_answers(each))) or ("",)
    return ("" if cell is None else gold_answer(cell),)
