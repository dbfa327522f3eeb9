"""The reward of verifiable mathematics: is the answer of a rollout the gold one, by Math-Verify?"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from basis_rl.registry import OneOrMore, Positive, checked
from basis_rl.rewards.base import Column, Completions, LogMetric, Reward, Scores, log_shares, warn_late
from basis_rl.rewards.extract import completion_text, is_sentence, last_boxed
from basis_rl.rewards.math.cache import Pair, Verdict, Verdicts
from basis_rl.rewards.math.notation import normal_form, text_form
from basis_rl.rewards.math.places import MathAnswerIn, find_answer
from basis_rl.rewards.math.quick import quick_verdict, same_parts, same_text
from basis_rl.rewards.math.reading import hedged, in_terms_of, primes_differ, refused_reading
from basis_rl.rewards.math.screen import screened
from basis_rl.rewards.thought import AfterThought, Unfinished
from basis_rl.rewards.workers.calls import WALL_CLOCK, worker_policy
from basis_rl.rewards.workers.failures import FailureMonitor
from basis_rl.rewards.workers.pool import Outcome, WorkerPool
from basis_rl.sandbox.run import fair_share

Rules = Literal["full", "plain"]
# Raised with every change of what counts as right, so that two gradings are never mixed.
RULES = 11
_MEMORY_BYTES = 4 << 30
# Seconds, at least, from which the limit by the clock follows where Math-Verify has its own limits for each step.
_PLAIN_TIMEOUT = 5.0
# Why an answer that was graded is wrong. Math-Verify finds it equal in the first, and was not asked in the second.
REJECTED = ("unsound", "refused", "unread", "unequal", "prose")
# Verdicts. Of those on several golds, one of which is enough, the first here is that on the rollout.
KINDS = ("right", "failed", "late", "timeout", "screened", *REJECTED, "no_gold")
_METRICS = {"screened": "screened", "timeout": "timeout", "infrastructure": "failed", "over_budget": "late"}
_METRICS |= {f"rejected/{kind}": kind for kind in REJECTED}
# If so many golds are sentences without exception, this is not the reward for them.
_MANY = 8
_log = logging.getLogger(__name__)


class MathVerifyReward(AfterThought, Reward):
    r"""1.0 if the answer of the rollout, by default its last balanced ``\boxed{...}``, equals the gold, else 0.0.

    Equal is what Math-Verify finds equal, except for what docs/rewards.md lists. Pairs that are not simple are graded
    in processes without network, rights and secrets (docs/security.md), each once. A rollout is not scored (None) if
    none of its golds can be parsed, if the grading failed (`Outcome.failed`), or if `batch_timeout` was over first.

    The gold is the last ``\boxed{}`` of the column ``solution``, or all of its text. A cell that is a list holds
    several golds, one of which is enough; several numbers that are all asked for are one gold, ``1, 2, 5``.

    Metrics: ``reward/no_box`` (``reward/no_answer`` with another `answer_in`), ``reward/screened``, ``reward/timeout``,
    ``reward/infrastructure`` (the grading failed), ``reward/over_budget`` and ``reward/rejected/KIND`` (`REJECTED`),
    shares of the rollouts. ``log_extra`` gets the verdict on each rollout and its reason, and the answer that was read.

    Args:
        num_workers: grading processes of this rank; default: its share of the machine's cores, at least 2.
        timeout: seconds of CPU time for one answer; an answer that takes more is wrong.
        batch_timeout: seconds by the clock for the rollouts of one call. What is not graded by then is not scored, and
            is graded when it comes again. None: no limit. `check_golds` and `equivalent` have none.
        rules: ``full``; or ``plain``: ``math_verify.verify(parse(gold in a box), parse(rollout))`` and nothing else,
            with Math-Verify's own time limits.
        answer_in: ``box``; ``tag``, ``hashes``, ``last_line``, ``last_number`` (`take_answer`); ``anywhere``: in a box,
            a tag or behind ``####`` if there is one, else in the last sentence that has one; ``auto``: ``box`` if the
            prompts ask for one, else ``anywhere``. Default: ``box``; with `rules` ``plain`` it is ``anywhere``.
        after_think, unfinished: see `AfterThought`; with `rules` ``plain`` `after_think` None is False.

    Raises:
        ValueError: a parameter out of its range, or an unknown name.
        RewardInfrastructureError: when called: the grading of more than 5 % of the recent rollouts failed
            (`FailureMonitor`), or no worker can be started.
    """

    __name__ = "math_verify_reward"
    gold_help = (
        "Math-Verify reads numbers and formulas. reward_funcs: exact is for words, choice for letters, code for tests; "
        "sentences need a reward function of your own (docs/rewards.md)."
    )
    reward_range = (0.0, 1.0)

    @checked("math_verify")
    def __init__(
        self,
        num_workers: OneOrMore | None = None,
        timeout: Positive = 5.0,
        batch_timeout: Positive | None = 300.0,
        rules: Rules = "full",
        answer_in: MathAnswerIn | None = None,
        after_think: bool | None = None,
        unfinished: Unfinished = "wrong",
    ) -> None:
        workers = fair_share() if num_workers is None else num_workers
        if rules == "plain" and answer_in not in (None, "anywhere", "auto"):
            raise ValueError(f"math_verify: rules: plain reads the whole rollout. Leave answer_in: {answer_in} out.")
        self.batch_timeout = batch_timeout
        self.rules = rules
        self.answer_in = answer_in
        after_think = False if rules == "plain" and after_think is None else after_think
        self._set_thought(after_think, unfinished)
        self._asks_for_box = True
        worker = Path(__file__).with_name("worker.py")
        # -P: the folder of the script stays off the path, where its files could shadow other modules
        command = [sys.executable, "-P", str(worker), str(timeout)]
        policy = worker_policy(_MEMORY_BYTES, processes=1)
        wall = WALL_CLOCK * (max(timeout, _PLAIN_TIMEOUT) if rules == "plain" else timeout)
        self._pool = WorkerPool(command, workers, wall, policy=policy)
        self._failures = FailureMonitor(name="The grading by Math-Verify")
        self._verdicts = Verdicts()

    @property
    def place(self) -> MathAnswerIn:
        """Where the answer is looked for: `answer_in`, once the prompts are known."""
        if self.rules == "plain":
            return "anywhere"
        if self.answer_in == "auto":
            return "box" if self._asks_for_box else "anywhere"
        return self.answer_in or "box"

    def _told_place(self) -> str:
        if self.rules == "plain":
            return "grades the whole rollout by Math-Verify alone (rules: plain)"
        guessed = self.answer_in == "auto" and not self._asks_for_box
        why = rf", since no prompt asks for a \boxed{{}} (answer_in: {self.place})" if guessed else ""
        return super()._told_place() + why

    @property
    def version(self) -> str:  # type: ignore[override]
        """What counts as right."""
        package = f"math-verify {version('math-verify')}"
        parts = [package, "plain" if self.rules == "plain" else f"rules {RULES}"]
        parts += [f"answer in {self.place}"] if self.place != "box" and self.rules == "full" else []
        return self._with_thought(", ".join(parts))

    def tell_template(self, template: str, asks_for_box: bool) -> None:
        """Take whether models think, and whether they are asked for a box: ``auto`` depends on it."""
        super().tell_template(template, asks_for_box)
        changed = self._asks_for_box and not asks_for_box and self.rules == "full"
        self._asks_for_box = asks_for_box
        if changed and self.answer_in == "auto":
            _log.warning(r"No prompt asks for a \boxed{}: answers are taken from anywhere in a rollout (answer_in).")
        elif changed and self.answer_in is None:
            _log.warning(
                r"No prompt asks for a \boxed{}, but only an answer in one is right. Ask for it in the prompts, or set "
                "answer_in: MathVerifyReward(answer_in='anywhere')."
            )

    def start(self) -> None:
        """Start the grading processes without waiting for them, so that they are ready when a model is loaded."""
        self._pool.start()

    def __call__(
        self, prompts: Column, completions: Completions, solution: Column, log_metric: LogMetric = None, **kwargs: Any
    ) -> Scores:
        answers = self.answers(completions, prompts, kwargs.get("truncated"))
        rows = _pairs(solution, answers)
        graded = self._grade([pair for row in rows for pair in row], seconds=self.batch_timeout)
        none = "no_box" if self.place == "box" else "no_answer"
        cut = kwargs.get("truncated") or [False] * len(rows)
        missing = ["unfinished" if each else none.replace("_", " ") for each in cut]
        verdicts = [_overall([graded[pair] for pair in row], each) for row, each in zip(rows, missing, strict=True)]
        kinds = list(map(_kind, verdicts))
        counts = {none: answers.count(None), **{name: kinds.count(kind) for name, kind in _METRICS.items()}}
        log_shares(log_metric, "", counts, len(answers))
        if (log_extra := kwargs.get("log_extra")) is not None:
            log_extra("verdict", verdicts)
            if self.rules == "full":
                log_extra("answer", answers)
        warn_late("The gradings", counts["over_budget"], len(answers), self.batch_timeout)
        self._record(verdicts)
        return self._settled(list(map(_reward, verdicts)), answers, kwargs.get("truncated"))

    def _answer(self, text: str) -> str | None:
        return text if self.rules == "plain" else find_answer(text, self.place)

    def plain(self, completions: Completions, solution: Column) -> Scores:
        """The rewards by `rules` ``plain``, whatever the rules of this object are."""
        rows = _pairs(solution, list(map(completion_text, completions)))
        graded = self._grade_plain([pair for row in rows for pair in row], None)
        return [_reward(_overall([graded[pair] for pair in row])) for row in rows]

    def check_golds(self, solution: Column) -> list[int]:
        """Indices of the golds to which no answer could be right: there is nothing in them, or grading them hangs.

        Of a list of golds none does. Those whose grading failed are not among them. Golds that are no formulas are
        logged. From 8 golds on, if every one is a sentence, all are returned: they need another reward.
        """
        golds = [gold_answers(cell) for cell in solution]
        if len(golds) >= _MANY and all(is_sentence(gold) for row in golds for gold in row):
            return list(range(len(golds)))
        pairs = {gold: (gold, self._written(gold)) for row in golds for gold in row}
        graded = self._grade(list(pairs.values()), check=True)
        verdicts = [["no_gold" if _is_missing(gold) else graded[pairs[gold]] for gold in row] for row in golds]
        self._record(list(map(_overall, verdicts)))
        kinds = [set(map(_kind, row)) for row in verdicts]
        if prose := [i for i, row in enumerate(kinds) if not row.isdisjoint(REJECTED)]:
            shown = "; ".join(repr(str(solution[i])[:80]) for i in prose[:5])
            message = "%d of %d golds are no formulas: only their own text is right (or set solution_pattern): %s."
            _log.warning(message, len(prose), len(kinds), shown)
        return [i for i, row in enumerate(kinds) if row.isdisjoint(("right", "failed", *REJECTED))]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the two answers of each pair, contents of boxes, are the same one, by the rules of the grading."""
        given = [(gold, self._written(answer)) for gold, answer in pairs]
        graded = self._grade(given)
        self._record([graded[pair] for pair in given])
        return [graded[pair] == "right" for pair in given]

    def _written(self, answer: str) -> str:
        """The content of a box in the form that is graded: by `plain` rules that is a rollout with the box."""
        return rf"\boxed{{{answer}}}" if self.rules == "plain" else answer

    def close(self) -> None:
        """End the grading processes; they also end with the object, and with the program."""
        self._pool.close()

    def _record(self, verdicts: Sequence[Verdict]) -> None:
        failed = verdicts.count("failed")
        self._failures.record(len(verdicts) - failed, failed)

    def _grade_plain(self, pairs: Sequence[Pair], seconds: float | None) -> dict[Pair, Verdict]:
        """Verdicts of Math-Verify alone on pairs of a gold and a rollout."""
        asked = list(dict.fromkeys(pairs))
        outcomes = self._pool.run([{"gold": gold, "text": text} for gold, text in asked], seconds=seconds)
        return {pair: _verdict(outcome) for pair, outcome in zip(asked, outcomes, strict=True)}

    def _grade(self, pairs: Sequence[Pair], check: bool = False, seconds: float | None = None) -> dict[Pair, Verdict]:
        """Verdicts of all pairs. With `check` a worker is asked even where the two are the same text."""
        if self.rules == "plain":
            return self._grade_plain(pairs, seconds)
        forms: dict[Pair, Pair] = {}
        graded: dict[Pair, Verdict] = {}
        for pair in dict.fromkeys(pairs):
            if not check and same_text(*pair):
                graded[pair] = "right"
            elif (measure := screened(*pair)) is not None:
                graded[pair] = f"screened: {measure}"
            else:
                gold = normal_form(pair[0])
                forms[pair] = (gold, in_terms_of(gold, normal_form(pair[1])))
        known = self._grade_forms(dict.fromkeys(forms.values()), check, seconds)
        return {**graded, **{pair: known[form] for pair, form in forms.items()}}

    def _grade_forms(self, pairs: Collection[Pair], check: bool, seconds: float | None) -> dict[Pair, Verdict]:
        """Verdicts of pairs of normal forms."""
        quick = {pair: self._without_worker(pair, check) for pair in pairs}
        graded = {pair: verdict for pair, verdict in quick.items() if verdict is not None}
        graded.update(self._verdicts.find(pair for pair in quick if pair not in graded))
        new = [pair for pair in quick if pair not in graded]
        tasks = [{"gold": gold, "answer": answer, "check": check} for gold, answer in new]
        outcomes = self._pool.run(tasks, seconds=seconds)
        fresh = {pair: _verdict(outcome) for pair, outcome in zip(new, outcomes, strict=True)}
        # What failed is not the answer's doing, and may go well the next time.
        self._verdicts.remember({pair: v for pair, v in fresh.items() if v not in ("failed", "late")})
        return {**graded, **fresh}

    def _without_worker(self, pair: Pair, check: bool) -> Verdict | None:
        """The verdict on a pair of normal forms; None where a worker has to be asked."""
        gold, answer = pair
        if not check and same_text(text_form(gold), text_form(answer)):
            return "right"
        right = same_parts(gold, answer)
        if right is False and gold.count(":") != answer.count(":"):
            return "refused: colon"
        if right is None:
            right = quick_verdict(gold, answer)
        if right is not None:
            return "right" if right else "unequal"
        if refused_reading(gold):
            return "prose"
        reason = refused_reading(answer) or (hedged(*pair) and "hedged") or (primes_differ(*pair) and "prime")
        return f"refused: {reason}" if reason else None


def _verdict(outcome: Outcome) -> Verdict:
    if outcome.status != "ok":
        return "failed" if outcome.failed else "timeout" if outcome.status == "timeout" else "late"
    # If grading fails, also because memory ran out, the answer is wrong.
    verdict: Verdict = outcome.value.get("verdict", "unread: error")
    return verdict


def _pairs(solution: Column, answers: Sequence[str | None]) -> list[list[Pair]]:
    """Each answer with each of its golds; none where there is no answer."""
    cells = zip(solution, answers, strict=True)
    return [[] if answer is None else [(gold, answer) for gold in gold_answers(cell)] for cell, answer in cells]


def _kind(verdict: Verdict) -> str:
    return verdict.partition(":")[0]


def _overall(verdicts: Sequence[Verdict], none: str = "") -> Verdict:
    """Of an answer that was graded against several golds; `none` if it was graded against none."""
    return min(verdicts, key=lambda verdict: (KINDS.index(_kind(verdict)), verdict), default=none)


def _reward(verdict: Verdict) -> float | None:
    return None if verdict in ("failed", "late", "no_gold") else float(verdict == "right")


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
