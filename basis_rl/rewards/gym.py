"""The reward of reasoning-gym's procedural problems, by reasoning-gym's own scorers."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from basis_rl.names import require_extra
from basis_rl.registry import check_choice
from basis_rl.rewards.base import Column, Completions, LogMetric, Reward, Scores, log_shares
from basis_rl.rewards.extract import AnswerIn, completion_text, take_answer
from basis_rl.rewards.workers.calls import Calls, check_limits

_RULES = 1


class ReasoningGymReward(Reward):
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

    Raises:
        ValueError: a parameter out of its range, or reasoning-gym is not installed or cannot be imported.
        FunctionError: when called: the column cannot be read, or was made by another version of reasoning-gym.
    """

    __name__ = "reasoning_gym_reward"
    reward_range = (0.0, 1.0)

    def __init__(
        self,
        answer_in: AnswerIn = "box",
        threshold: float | None = None,
        num_workers: int = 2,
        timeout: float = 5.0,
        memory_bytes: int = 4 << 30,
    ) -> None:
        check_choice("reasoning_gym", "answer_in", answer_in, AnswerIn)
        check_limits("reasoning_gym", num_workers, timeout, memory_bytes)
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"reasoning_gym: threshold must be in (0, 1], got {threshold!r}.")
        require_extra("reasoning_gym", "The reward reasoning_gym")
        installed = version("reasoning-gym")
        self.answer_in: AnswerIn = answer_in
        self.threshold = threshold
        self.version = f"reasoning-gym {installed}, rules {_RULES}, {answer_in}, threshold {threshold}"
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
        answers = self.answers(completions)
        references = [cell if isinstance(cell, str) else json.dumps(cell) for cell in reasoning_gym]
        pairs = list(zip(answers, references, strict=True))
        asked = [pair for pair in dict.fromkeys(pairs) if pair[0] is not None]
        scores = self._calls.run([([answer, ref], {}) for answer, ref in asked], log_metric)
        log_shares(log_metric, "reasoning_gym", {"no_answer": answers.count(None)}, len(answers))
        rewards = {pair: self._reward(score) for pair, score in zip(asked, scores, strict=True)}
        return [rewards.get(pair, 0.0) for pair in pairs]

    def answers(self, completions: Completions, prompts: Column = ()) -> list[str | None]:
        """What is scored of each rollout; None where there is no answer."""
        return [take_answer(completion_text(completion), self.answer_in) for completion in completions]

    def _reward(self, score: float | None) -> float | None:
        if score is None:
            return None
        score = min(1.0, max(0.0, score))
        return score if self.threshold is None else float(score >= self.threshold)
