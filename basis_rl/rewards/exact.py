"""The reward of answers that are right only as they are written."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Any

from basis_rl.registry import checked
from basis_rl.rewards.base import Column, Completions, LogMetric, Scores, log_shares
from basis_rl.rewards.extract import AnswerIn, is_blank, plain_number
from basis_rl.rewards.math.notation import FONT
from basis_rl.rewards.thought import AfterThought, Unfinished

_RULES = 4
_ENDS = " \t\n.,;:!?"
_QUOTES = ('""', "''", "“”", "‘’", "``")
_FONT = re.compile(rf"{FONT}\s*+\{{([^{{}}]*+)\}}")
# A dollar sign with a backslash is a price before a digit only: golds may be regular expressions.
_ESCAPED = re.compile(r"\\([_%&# ]|\$(?=\d))|(?<=\w)~(?=\w)")
_MOST_FONTS = 4


class ExactReward(AfterThought):
    """1.0 if the rollout's answer is the gold string, after the same normalisation of both, else 0.0.

    A reward function as TRL knows them; it reads the dataset's ``solution`` column: a string, or a list of strings any
    of which is right. The gold is taken as it is, not looked for in a text. A rollout without a gold, or with one of
    which the normalisation leaves nothing, is not scored (None). An answer in a box may also be written as LaTeX asks
    for it (`plain_text`), and with a full stop behind it.

    Metric: ``reward/exact/no_answer``, the share of rollouts without an answer in the expected place.

    Args:
        answer_in: where the answer is: see `take_answer`.
        ignore_case: compare case-folded.
        ignore_space: a run of white space counts as one space; none at the ends.
        ignore_punctuation: leave out quotation marks around the answer and ``.,;:!?`` at its end. Nothing at its
            beginning, where ``-`` and ``.`` belong to a number.
        numbers: two numerals of the same value (`plain_number`) are the same, ``1,000`` and ``1000.0``.
        after_think, unfinished: see `AfterThought`.

    Raises:
        ValueError: unknown `answer_in`.
    """

    __name__ = "exact_reward"
    reward_range = (0.0, 1.0)

    @checked("exact")
    def __init__(
        self,
        answer_in: AnswerIn = "box",
        ignore_case: bool = True,
        ignore_space: bool = True,
        ignore_punctuation: bool = False,
        numbers: bool = False,
        after_think: bool | None = None,
        unfinished: Unfinished = "wrong",
    ) -> None:
        self.answer_in: AnswerIn = answer_in
        self.ignore_case = ignore_case
        self.ignore_space = ignore_space
        self.ignore_punctuation = ignore_punctuation
        self.numbers = numbers
        self._set_thought(after_think, unfinished)
        ignored = [name for name in ("case", "space", "punctuation") if getattr(self, f"ignore_{name}")]
        self._stated = f"rules {_RULES}, {answer_in}, ignores {' '.join(ignored) or 'nothing'}"
        self._stated += ", numbers by value" if numbers else ""

    def __call__(
        self, prompts: Column, completions: Completions, solution: Column, log_metric: LogMetric = None, **kwargs: Any
    ) -> Scores:
        answers = self.answers(completions, prompts, kwargs.get("truncated"))
        log_shares(log_metric, "exact", {"no_answer": answers.count(None)}, len(answers))
        rewards: Scores = []
        for answer, cell in zip(answers, solution, strict=True):
            golds = self._golds(cell)
            rewards.append(float(answer is not None and self._is_one_of(answer, golds)) if golds else None)
        return self._settled(rewards, answers, kwargs.get("truncated"))

    def _is_one_of(self, answer: str, golds: set[str | Fraction]) -> bool:
        written = [answer]
        if self.answer_in == "box":
            plain = plain_text(answer)
            written += [plain, plain.removesuffix(".")]
        return not golds.isdisjoint(map(self._compared, written))

    def _compared(self, text: str) -> str | Fraction:
        """The value of a numeral where numbers are compared as such, else the `normal` form."""
        normal = self.normal(text)
        value = plain_number(normal) if self.numbers else None
        return normal if value is None else value

    def normal(self, text: str) -> str:
        """The form in which answers are compared; composed Unicode (NFC) in any case."""
        text = unicodedata.normalize("NFC", text)
        if self.ignore_punctuation:
            text = text.strip().rstrip(_ENDS)
            if len(text) > 1 and text[0] + text[-1] in _QUOTES:
                text = text[1:-1].rstrip(_ENDS)
        if self.ignore_space:
            text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text

    def check_golds(self, solution: Column) -> list[int]:
        """Indices of the golds of which the normalisation leaves nothing."""
        return [i for i, cell in enumerate(solution) if not self._golds(cell)]

    def _golds(self, cell: Any) -> set[str | Fraction]:
        cells = cell if isinstance(cell, (list, tuple)) else [cell]
        return {
            self._compared(str(gold)) for gold in cells if gold is not None and not is_blank(self.normal(str(gold)))
        }


def plain_text(answer: str) -> str:
    r"""A text without what LaTeX needs to show it: ``\text{not\_so}`` is ``not_so``; ``a\ b``, ``a~b`` are ``a b``."""
    for _ in range(_MOST_FONTS):
        answer = _FONT.sub(r"\1", answer)
    return _ESCAPED.sub(lambda match: match[1] or " ", answer)
