"""The reward of verifiable mathematics: is the last boxed answer the gold one, by Math-Verify?"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from basis_rl.rewards.base import Column, Completions, LogMetric, Reward, Scores, log_shares
from basis_rl.rewards.extract import completion_text, last_boxed
from basis_rl.rewards.math.cache import Pair, Verdict, Verdicts
from basis_rl.rewards.math.notation import normal_form, text_form
from basis_rl.rewards.math.quick import quick_verdict, same_ratio, same_text, same_time
from basis_rl.rewards.math.reading import hedged, primes_differ, refused_reading
from basis_rl.rewards.math.rules import RULES, refused
from basis_rl.rewards.math.screen import screened
from basis_rl.rewards.workers.calls import WALL_CLOCK
from basis_rl.rewards.workers.failures import FailureMonitor
from basis_rl.rewards.workers.pool import Outcome, WorkerPool
from basis_rl.sandbox import Policy, python_paths
from basis_rl.sandbox.run import fair_share

_MEMORY_BYTES = 4 << 30
_FOLDER_BYTES = 64 << 20
_METRICS: dict[str, Verdict] = {
    "screened": "screened", "timeout": "timeout", "infrastructure": "failed", "over_budget": "late"
}  # fmt: skip
_log = logging.getLogger(__name__)


class MathVerifyReward(Reward):
    r"""1.0 if the last balanced ``\boxed{...}`` of the rollout equals the gold answer, else 0.0.

    Equal is what Math-Verify finds equal, except for the notations and readings that docs/rewards.md lists. Simple
    pairs are decided here; the others are graded once each, in processes without network, rights and secrets
    (docs/security.md). An answer that takes more than `timeout` seconds of CPU time is wrong; nothing that a model
    wrote raises or hangs. A rollout is not scored (None; its advantage is 0) if none of its golds can be parsed, if the
    grading failed (`Outcome.failed`), or if `batch_timeout` was over first.

    The gold is the last ``\boxed{}`` of the dataset's column ``solution``, or all of its text. A cell that is a list
    holds several golds, one of which is enough; several numbers that are all asked for are one gold, ``1, 2, 5``.

    Metrics, where the trainer passes ``log_metric``: ``reward/no_box``, ``reward/screened``, ``reward/timeout``,
    ``reward/infrastructure`` (the grading failed) and ``reward/over_budget``, shares of the rollouts.

    Args:
        num_workers: grading processes (of this rank); default: the machine's cores, shared among its ranks, at least 2.
        timeout: seconds of CPU time for one answer.
        batch_timeout: seconds by the clock for the rollouts of one call, which are otherwise bounded by their number
            only. What is not graded by then is not scored, and graded the next time that it comes. None: no bound.
            `check_golds` and `equivalent` have none.
        allow: names of the acceptances of Math-Verify that are kept (`basis_rl.rewards.math.rules.QUIRKS`); a verdict
            that rests on another one is wrong. None: all of them.

    Raises:
        ValueError: a parameter out of its range, or an unknown name.
        RewardInfrastructureError: when called, if the grading of more than 5 % of the recent rollouts failed
            (`FailureMonitor`), or no worker can be started.
    """

    __name__ = "math_verify_reward"
    reward_range = (0.0, 1.0)

    def __init__(
        self,
        num_workers: int | None = None,
        timeout: float = 5.0,
        allow: Collection[str] | None = None,
        batch_timeout: float | None = 300.0,
    ) -> None:
        workers = fair_share() if num_workers is None else num_workers
        if workers < 1 or timeout <= 0 or (batch_timeout is not None and batch_timeout <= 0):
            raise ValueError(
                "MathVerifyReward needs num_workers >= 1 and timeout > 0, and a batch_timeout > 0 or None, got "
                f"{num_workers}, {timeout}, {batch_timeout}."
            )
        self.batch_timeout = batch_timeout
        self.refused = refused([allow] if isinstance(allow, str) else allow)
        self.version = f"math-verify {version('math-verify')}, rules {RULES}"
        if self.refused:
            self.version += f", without {', '.join(self.refused)}"
        worker = Path(__file__).with_name("worker.py")
        # -P: the folder of the script stays off the path, where its files could shadow other modules
        command = [sys.executable, "-P", str(worker), str(timeout)]
        policy = Policy(
            memory_bytes=_MEMORY_BYTES,
            file_bytes=_FOLDER_BYTES,
            folder_bytes=_FOLDER_BYTES,
            processes=1,
            readable=python_paths(),
        )
        wall = WALL_CLOCK * timeout
        self._pool = WorkerPool(command, workers, wall, cpu_timeout=timeout, policy=policy)
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
        graded = self._grade([pair for row in rows for pair in row], seconds=self.batch_timeout)
        verdicts = [{graded[pair] for pair in row} for row in rows]
        counts = {name: sum(verdict in row for row in verdicts) for name, verdict in _METRICS.items()}
        log_shares(log_metric, "", {"no_box": answers.count(None), **counts}, len(answers))
        if counts["over_budget"]:
            _log.warning(
                "The grading of %d of %d rollouts was not done in batch_timeout (%g s): they are not scored.",
                counts["over_budget"], len(answers), self.batch_timeout,
            )  # fmt: skip
        self._record(verdicts)
        return [_reward(row) for row in verdicts]

    def check_golds(self, solution: Column) -> list[int]:
        """Indices of the golds to which no answer could be right: there is nothing in them, or grading them hangs.

        Of a list of golds none does. Those whose grading failed are not among them. What else is wrong with golds is
        logged (`gold_notes`).
        """
        verdicts = self._gold_verdicts(solution)
        notes = _notes(verdicts)
        if notes:
            shown = "; ".join(f"row {i}, {note}: {str(solution[i])[:80]!r}" for i, note in list(notes.items())[:5])
            _log.warning("%d of %d golds may not say what they mean: %s.", len(notes), len(verdicts), shown)
        return [i for i, row in enumerate(verdicts) if row.isdisjoint({"right", "wrong", "misread", "failed"})]

    def gold_notes(self, solution: Column) -> dict[int, str]:
        """Golds that are graded otherwise than a reader may expect, by their index: why.

        ``prose``: no formula; only its own text is right. ``misread``: Math-Verify alone takes it for something that
        lacks its numbers or symbols (``2x^2 + 3y^2 = d`` for 3, d being a unit); here it is graded as what it says.
        """
        return _notes(self._gold_verdicts(solution))

    def _gold_verdicts(self, solution: Column) -> list[set[Verdict]]:
        golds = [gold_answers(cell) for cell in solution]
        graded = self._grade([(gold, gold) for row in golds for gold in row], check=True)
        verdicts = [{"no_gold" if _is_missing(gold) else graded[gold, gold] for gold in row} for row in golds]
        self._record(verdicts)
        return verdicts

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

    def _grade(self, pairs: Sequence[Pair], check: bool = False, seconds: float | None = None) -> dict[Pair, Verdict]:
        """Verdicts of all pairs. With `check` a worker is asked even where the two are the same text."""
        forms: dict[Pair, Pair] = {}
        graded: dict[Pair, Verdict] = {}
        for pair in dict.fromkeys(pairs):
            if not check and same_text(*pair):
                graded[pair] = "right"
            elif screened(*pair) is not None:
                graded[pair] = "screened"
            else:
                forms[pair] = (normal_form(pair[0]), normal_form(pair[1]))
        known = self._grade_forms(dict.fromkeys(forms.values()), check, seconds)
        return {**graded, **{pair: known[form] for pair, form in forms.items()}}

    def _grade_forms(self, pairs: Collection[Pair], check: bool, seconds: float | None) -> dict[Pair, Verdict]:
        """Verdicts of pairs of normal forms."""
        graded: dict[Pair, Verdict] = {}
        asked: list[Pair] = []
        for pair in pairs:
            right = self._quick(pair, check)
            if right is None:
                asked.append(pair)
            else:
                # A ratio to Math-Verify.
                misread = right and check and same_time(*pair)
                graded[pair] = "misread" if misread else "right" if right else "wrong"
        graded.update(self._verdicts.find(asked))
        new = [pair for pair in asked if pair not in graded]
        options: dict[str, Any] = {"refuse": list(self.refused)} if self.refused else {}
        options |= {"check": True} if check else {}
        tasks = [{"gold": gold, "answer": answer, **options} for gold, answer in new]
        outcomes = self._pool.run(tasks, seconds=seconds) if new else []
        fresh = {pair: _verdict(outcome) for pair, outcome in zip(new, outcomes, strict=True)}
        # What failed is not the answer's doing, and may go well the next time.
        self._verdicts.remember({pair: v for pair, v in fresh.items() if v not in ("failed", "late")})
        return {**graded, **fresh}

    def _quick(self, pair: Pair, check: bool) -> bool | None:
        gold, answer = pair
        if not check and same_text(text_form(gold), text_form(answer)):
            return True
        right = same_time(gold, answer)
        if right is None:
            right = quick_verdict(gold, answer, any_case="case" not in self.refused)
        if right is None:
            right = same_ratio(gold, answer)
        if right is None and (refused_reading(answer) or refused_reading(gold)):
            return False
        if right is None and (hedged(gold, answer) or primes_differ(gold, answer)):
            return False
        return right


def _verdict(outcome: Outcome) -> Verdict:
    if outcome.status == "over_budget":
        return "late"
    if outcome.status == "timeout" or outcome.failed:
        return "failed" if outcome.failed else "timeout"
    if outcome.value.get("misread") and outcome.value.get("verdict"):
        return "misread"
    # If grading fails, also because memory ran out, the answer is wrong.
    right = outcome.value.get("verdict", False)
    return "no_gold" if right is None else "right" if right else "wrong"


def _reward(verdicts: set[Verdict]) -> float | None:
    """Of an answer that was graded against several golds; against none if it has no box."""
    if "right" in verdicts:
        return 1.0
    return None if verdicts & {"failed", "late"} or verdicts == {"no_gold"} else 0.0


def _notes(verdicts: Sequence[set[Verdict]]) -> dict[int, str]:
    notes: dict[Verdict, str] = {"wrong": "prose", "misread": "misread"}
    return {i: notes[name] for i, row in enumerate(verdicts) for name in ("misread", "wrong") if name in row}


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
