"""The reward of reasoning-gym's procedural problems, by reasoning-gym's own scorers."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from basis_rl.names import require_extra
from basis_rl.registry import OneOrMore, Positive, PositiveShare, checked
from basis_rl.rewards.base import Column, Completions, LogMetric, Scores, log_shares
from basis_rl.rewards.exact import ExactReward
from basis_rl.rewards.extract import AnswerIn
from basis_rl.rewards.thought import AfterThought, Unfinished
from basis_rl.rewards.workers.calls import Calls

_RULES = 2
# What a model writes that has not read the question.
_CONSTANTS = ("0", "1", "-1", "yes", "no", "True", "False", "A", "B", "[]", "None", "the answer")
_SET = re.compile(r'"(?:source_)?dataset"\s*:\s*"(\w+)"')
# Entries of a set that are tried; fewer show nothing.
_TRIED = 6
_FEWEST = 3
_SAME = ExactReward("whole", numbers=True)
_log = logging.getLogger(__name__)


class ReasoningGymReward(AfterThought):
    """What reasoning-gym's scorer of the problem (``score_answer``) gives the answer, a number in [0, 1].

    It reads the column ``reasoning_gym`` of data sets ``reasoning_gym:NAME``: a JSON object with ``dataset`` (the
    name), ``config`` (its parameters) and either ``entry`` (question, answer, metadata; a tuple is ``{"__tuple__":
    [...]}``), or ``index`` and ``question_sha256`` (the first 16 hex digits), from which the worker makes the same
    entry again.

    Some scorers ``eval`` what the model wrote, so they run in workers without network and without a place to write to
    (as far as the machine can: `basis_rl.sandbox.isolation`). An answer that takes more than `timeout` or its memory is
    wrong; a rollout whose worker died twice is not scored (None).

    Metrics: ``reward/reasoning_gym/no_answer``, ``.../timeout``, ``.../memory`` and ``.../infrastructure``, shares of
    the rollouts.

    Args:
        answer_in: where the answer is: see `take_answer`. Answers of several lines are better asked for in a ``tag``.
        threshold: scores of at least this are 1.0, others 0.0; None leaves partial credit.
        num_workers: scoring processes of this rank.
        timeout: seconds of CPU time for one answer.
        memory_bytes: address space of a worker beyond its imports.
        after_think, unfinished: see `AfterThought`.

    Raises:
        ValueError: a parameter out of its range, or reasoning-gym is not installed or cannot be imported.
        FunctionError: when called: the column cannot be read, or was made by another version of reasoning-gym.
    """

    __name__ = "reasoning_gym_reward"
    reward_range = (0.0, 1.0)
    gold_columns = ("reasoning_gym", "solution")

    @checked("reasoning_gym")
    def __init__(
        self,
        answer_in: AnswerIn = "box",
        threshold: PositiveShare | None = None,
        num_workers: OneOrMore = 2,
        timeout: Positive = 5.0,
        memory_bytes: OneOrMore = 4 << 30,
        after_think: bool | None = None,
        unfinished: Unfinished = "wrong",
    ) -> None:
        require_extra("reasoning_gym", "The reward reasoning_gym")
        self.answer_in: AnswerIn = answer_in
        self.threshold = threshold
        self._set_thought(after_think, unfinished)
        self._stated = f"reasoning-gym {version('reasoning-gym')}, rules {_RULES}, {answer_in}, threshold {threshold}"
        scorer = Path(__file__).with_name("gym_scorer.py")
        self._calls = Calls("reasoning_gym", f"{scorer}:gym_score", num_workers, timeout, memory_bytes, shut_in=True)
        self._calls.describe()

    def __call__(
        self,
        prompts: Column,
        completions: Completions,
        reasoning_gym: Column,
        log_metric: LogMetric = None,
        **kwargs: Any,
    ) -> Scores:
        answers = self.answers(completions, prompts, kwargs.get("truncated"))
        pairs = list(zip(answers, map(_reference, reasoning_gym), strict=True))
        asked = [pair for pair in dict.fromkeys(pairs) if pair[0] is not None]
        scores = self._calls.run([([answer, ref], {}) for answer, ref in asked], log_metric)
        log_shares(log_metric, "reasoning_gym", {"no_answer": answers.count(None)}, len(answers))
        rewards = {pair: self._reward(score) for pair, score in zip(asked, scores, strict=True)}
        return self._settled([rewards.get(pair, 0.0) for pair in pairs], answers, kwargs.get("truncated"))

    def check_golds(self, solution: Column, golds: Column | None = None) -> list[int]:
        """Try a dozen constants on the first entries of each set; there are never any indices.

        Of a constant only the entries count whose answer it is not: on the others it is right. Those that pay more than
        the base rate, which is the share of the commonest answer, are logged.

        Args:
            solution: the cells of the entries.
            golds: their answers.

        Raises:
            ValueError: a constant gets more than half of the full score: the set's scorer is broken.
        """
        sets: dict[str, list[tuple[str, Any]]] = {}
        for cell, gold in zip(map(_reference, solution), golds or solution, strict=True):
            for name in _SET.findall(cell)[-1:]:
                sets.setdefault(name, []).append((cell, gold))
        for name, rows in sets.items():
            tried = rows[:_TRIED]
            paid, constant = max((self._paid(constant, tried), constant) for constant in _CONSTANTS)
            found = f"reasoning_gym: '{name}' pays {paid:.2f} on average for {constant!r} where that is not the answer"
            if paid > 0.5:
                raise ValueError(f"{found}. Leave '{name}' out until reasoning-gym's scorer of it is repaired.")
            if paid > Counter(str(gold) for _, gold in tried).most_common(1)[0][1] / len(tried):
                _log.warning("%s, more than the commonest answer would: a model may learn to write it.", found)
        return []

    def _paid(self, constant: str, rows: list[tuple[str, Any]]) -> float:
        """The mean score of a constant where it is not the gold; 0 if there are too few such rows."""
        calls: list[Any] = [([constant, cell], {}) for cell, gold in rows if not _SAME([], [constant], [str(gold)])[0]]
        return fmean(self._reward(score) or 0.0 for score in self._calls.run(calls)) if len(calls) >= _FEWEST else 0.0

    def _reward(self, score: float | None) -> float | None:
        if score is None:
            return None
        score = min(1.0, max(0.0, score))
        return score if self.threshold is None else float(score >= self.threshold)


def _reference(cell: Any) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell)
