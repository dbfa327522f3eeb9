"""The reward of verifiable mathematics: is the last boxed answer the gold one, by Math-Verify?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from basis_rl.rewards.cache import Pair, Verdicts
from basis_rl.rewards.extract import completion_text, last_boxed
from basis_rl.rewards.pool import WorkerPool
from basis_rl.rewards.quick import quick_verdict, same_text
from basis_rl.rewards.rules import RULES, refused
from basis_rl.rewards.screen import screened

_MEMORY_BYTES = 4 << 30


class MathVerifyReward:
    r"""1.0 if the last balanced ``\boxed{...}`` of the completion equals the gold answer, else 0.0.

    Equal is what Math-Verify finds equal, but for the few pairs of `basis_rl.rewards.rules.DIFFERENCES`
    (docs/rewards.md). The gold's own text, plain numerals and single letters are compared here (`quick_verdict`), what
    is far too large or too deep for the gold is wrong unseen (`screened`), and only the rest goes to a worker, each
    pair once.

    A reward function as TRL knows them; it reads the dataset's ``solution`` column. The gold is the content of its own
    last ``\boxed{}`` where it has one, else the whole text, and is given to Math-Verify inside a box (bare LaTeX golds
    fail against themselves). A cell that is a list holds several golds, and an answer that equals one of them is right;
    where all of several numbers are asked for, they are one gold, ``1, 2, 5``.

    Grading runs in processes that are killed when they hang, so this never raises for what a model wrote, and never
    hangs: an answer that takes longer than `timeout` counts as wrong. A rollout is not scored (None; the trainer gives
    it advantage 0) when no gold of it can be parsed, or when the worker died twice on it.

    Metrics, where the trainer passes ``log_metric``: ``reward/no_box``, ``reward/screened`` and ``reward/timeout``,
    shares of the rollouts.

    Args:
        num_workers: grading processes (of this rank).
        timeout: seconds for one answer, from the moment that a worker takes it up.
        allow: names of the acceptances of Math-Verify that are kept (`basis_rl.rewards.rules.QUIRKS`); a verdict that
            rests on another one is wrong. None: all of them.

    Raises:
        ValueError: a parameter out of its range, or an unknown name.
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
        # -P: the script's folder stays off the path, where this very file would shadow the package math_verify
        command = [sys.executable, "-P", str(worker), str(timeout), str(_MEMORY_BYTES)]
        self._pool = WorkerPool(command, num_workers, timeout)
        self._verdicts = Verdicts()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str | list[dict[str, str]]],
        solution: Sequence[str | Sequence[str]],
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        answers = [last_boxed(completion_text(completion)) for completion in completions]
        golds = [gold_answers(cell) for cell in solution]
        graded = self._grade(
            [(g, answer) for row, answer in zip(golds, answers, strict=True) for g in row if answer is not None]
        )
        rewards = [
            0.0 if answer is None else _reward([graded.verdicts[gold, answer] for gold in row])
            for row, answer in zip(golds, answers, strict=True)
        ]
        if log_metric is not None and answers:
            rows = [
                [(gold, answer) for gold in row]
                for row, answer in zip(golds, answers, strict=True)
                if answer is not None
            ]
            log_metric("reward/no_box", sum(answer is None for answer in answers) / len(answers))
            for name, pairs in (("screened", graded.screened), ("timeout", graded.timeouts)):
                log_metric(f"reward/{name}", sum(not pairs.isdisjoint(row) for row in rows) / len(answers))
        return rewards

    def check_golds(self, solution: Sequence[Any]) -> list[int]:
        """Indices of the golds that do not verify against themselves: no answer to them could ever be right.

        Of a list of golds none does.
        """
        golds = [gold_answers(cell) for cell in solution]
        graded = self._grade([(gold, gold) for row in golds for gold in row], check=True)
        valid = {gold for (gold, _), right in graded.verdicts.items() if right and not _is_missing(gold)}
        return [i for i, row in enumerate(golds) if valid.isdisjoint(row)]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the two answers of each pair, contents of boxes, are the same one, by the rules of the grading."""
        graded = self._grade(pairs)
        return [graded.verdicts[gold, answer] is True for gold, answer in pairs]

    def close(self) -> None:
        """End the grading processes; they also end with the object, and with the program."""
        self._pool.close()

    def _grade(self, pairs: Sequence[Pair], check: bool = False) -> _Graded:
        """Verdicts of all pairs. With `check` a worker is asked even where the two are the same text."""
        graded = _Graded({}, set(), set())
        asked: list[Pair] = []
        for pair in dict.fromkeys(pairs):
            verdict = self._quick(pair, check)
            if verdict is not None:
                graded.verdicts[pair] = verdict
            elif not check and screened(*pair) is not None:
                graded.verdicts[pair] = False
                graded.screened.add(pair)
            else:
                asked.append(pair)
        graded.verdicts.update(self._verdicts.find(asked))
        new = [pair for pair in asked if pair not in graded.verdicts]
        options = {"refuse": list(self.refused)} if self.refused else {}
        outcomes = self._pool.run([{"gold": gold, "answer": answer, **options} for gold, answer in new]) if new else []
        lasting: dict[Pair, bool | None] = {}
        for pair, outcome in zip(new, outcomes, strict=True):
            if outcome.status == "ok":
                lasting[pair] = outcome.value["verdict"]
            else:  # how long an answer takes depends on the load: not remembered
                graded.verdicts[pair] = False if outcome.status == "timeout" else None
                if outcome.status == "timeout":
                    graded.timeouts.add(pair)
        self._verdicts.remember(lasting)
        graded.verdicts.update(lasting)
        return graded

    def _quick(self, pair: Pair, check: bool) -> bool | None:
        if not check and same_text(*pair):
            return True
        return quick_verdict(*pair, any_case="case" not in self.refused)


@dataclass
class _Graded:
    verdicts: dict[Pair, bool | None]
    screened: set[Pair]
    timeouts: set[Pair]


def _reward(verdicts: list[bool | None]) -> float | None:
    """Of an answer that was graded against several golds."""
    if True in verdicts:
        return 1.0
    return 0.0 if False in verdicts else None


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
