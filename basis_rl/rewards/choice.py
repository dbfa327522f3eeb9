"""The reward of multiple-choice questions: which letter does the rollout settle on?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from basis_rl.registry import checked
from basis_rl.rewards.base import Column, Completions, LogMetric, Scores, Truncated, log_shares
from basis_rl.rewards.extract import last_boxed, take_answer
from basis_rl.rewards.thought import AfterThought, Unfinished

_RULES = 5
# Every quantifier is possessive and what follows it cannot begin with what it takes: no text is read twice.
_SKIP = r"[\s*_:$]*+"
_LETTER = r"(?P<open>[(\[{]?)(?P<letter>[A-Za-z])(?![A-Za-z0-9'’])"
_STATED = re.compile(
    r"(?:\b(?i:(?:correct|right|best|final)\s(?:option|choice|answer)|answer|antwort|réponse|respuesta|risposta|resposta)"
    # After a heading only a letter that is all of the rest.
    r"(?:[ *_$]*+\n(?=[\s*_$]*+[(\[]?[A-Z][)\].*_$]*+\s*+\Z)"
    r"|[\s*_$]*+(?:(?P<mark>[:=：])|(?i:is|would\sbe|must\sbe|ist|lautet|est|es|è|é)\b))"
    rf"|(?:答案|选项|选择)[\s*_$]*+(?:[:：]|应?[是为选]){{1,2}}+){_SKIP}"
    rf"(?:(?i:the\s)?+(?i:option|choice|letter)\b)?+{_SKIP}(?:\\(?:text|textbf|mathrm|mathbf|boxed)\{{)?+{_LETTER}"
)
_MORE = re.compile(
    r"[)\]}.*$]*+\s*+(?:(?i:or|and|oder|und|ou|et|o|y|e)\b|[/,;&|，、或和与])[\s*_$]*+(?:\\text\{)?+[(\[{]?[A-Z]"
    r"(?![A-Za-z0-9'’])"
)
_WORD_FOLLOWS = re.compile(r"\s++(?!(?:because|since|as)\b)[a-z]")
_BOXED = re.compile(
    rf"[\s$*]*+(?:\\(?:text|textbf|mathrm|mathbf|textrm|textit)\s*+\{{)?+[\s$*]*+(?i:(?:option|choice)\s)?+{_LETTER}(?P<rest>[)\]}}.:\s$*]*+)"
)
_ENDS_LINE = re.compile(r"[*_$.]*+(?:\n|\Z)")
_ALONE = re.compile(r"[\s*_$]*+(?i:(?:option|choice)\s++)?+[(\[]?[A-Za-z][)\].]*+[\s*_$.]*+")
# Behind one letter, another one: "(A) or (B)", "\text{A}, \text{B}".
_OTHER = re.compile(
    r"\s*+(?:[,;/&|，、或和与]|(?:\\text\s*+\{\s*+)?(?:or|and)\b\s*+\}?)?+\s*+"
    r"(?:\\(?:text|textbf|mathrm|mathbf|textrm|textit)\s*+\{)?+\s*+[(\[{]?(?P<letter>[A-Z])(?=$|[)\]},.;:/&|$\s])"
)
# Another option with its text.
_ANOTHER = re.compile(r"(?<![A-Za-z(])\(?(?P<letter>[A-J])(?:\)|[.:](?=\s))")


def _mark(letter: str, following: str) -> str:
    """The pattern of an option with its text: a letter that begins a line, or that a mark follows. Not in a list of
    letters, "(A), (B) or (C)"."""
    text = rf"(?!(?:or|and|{following})\b)\w"
    return rf"^[^\w\n]*+{letter}[^\w\n]+{text}|(?<!\w){letter}\s?[)\]}}.:|=、*–—-][^\w,;/]*+{text}"


class ChoiceReward(AfterThought):
    r"""1.0 if the letter that the rollout settles on is the gold one, else 0.0.

    The letter is that of the last balanced ``\boxed{...}`` (``B``, ``(B)``, ``\text{B}``, ``B. Paris``); without a box
    that of the last ``<answer>B</answer>``; without either that of the last statement "Answer: (B)", "the answer is B",
    "Antwort: B", "答案：B", or the letter that is all of the text after the thought, alone or with the words that the
    problem has behind it. A box, tag or statement that names several letters, or none, is wrong; so is a rollout
    without any of these. The gold is the dataset's column ``solution``: a letter in any of these forms, or with
    `gold_index` the number of the option. A rollout whose gold is neither is not scored (None).

    Metric: ``reward/choice/no_answer``, the share of rollouts without a letter.

    Args:
        letters: the options, in capitals.
        ignore_case: take ``\boxed{b}``, ``Answer: (b)`` and a line that ends with ``Answer: b`` too. A bare small
            letter after "the answer is" is never one.
        gold_index: the number that stands for the first option (0 or 1), where golds are numbers.
        after_think, unfinished: see `AfterThought`.

    Raises:
        ValueError: letters that are not distinct capitals, or a `gold_index` other than 0, 1 or None.
    """

    __name__ = "choice_reward"
    reward_range = (0.0, 1.0)
    place = "letter"

    @checked("choice")
    def __init__(
        self,
        letters: str = "ABCDEFGHIJ",
        ignore_case: bool = True,
        gold_index: int | None = None,
        after_think: bool | None = None,
        unfinished: Unfinished = "wrong",
    ) -> None:
        if not isinstance(letters, str) or not re.fullmatch("[A-Z]{2,26}", letters) or len(set(letters)) < len(letters):
            raise ValueError(f"choice: letters must be different capital letters, such as ABCD, got {letters!r}.")
        if gold_index not in (None, 0, 1) or isinstance(gold_index, bool):
            raise ValueError(f"choice: gold_index must be 0 or 1 (the number of the first option), got {gold_index!r}.")
        self.letters = letters
        self.ignore_case = ignore_case
        self.gold_index = gold_index
        self._set_thought(after_think, unfinished)
        self._marks = [re.compile(_mark(*letters[i : i + 2].ljust(2)), re.MULTILINE | re.IGNORECASE) for i in (0, 1)]
        self._stated = f"rules {_RULES}, {letters}{', any case' if ignore_case else ''}"

    def __call__(
        self, prompts: Column, completions: Completions, solution: Column, log_metric: LogMetric = None, **kwargs: Any
    ) -> Scores:
        chosen = self.answers(completions, prompts, kwargs.get("truncated"))
        golds = [self.gold(cell) for cell in solution]
        log_shares(log_metric, "choice", {"no_answer": chosen.count(None)}, len(chosen))
        scores = [None if gold is None else float(letter == gold) for letter, gold in zip(chosen, golds, strict=True)]
        return self._settled(scores, chosen, kwargs.get("truncated"))

    def answers(
        self, completions: Sequence[Any], prompts: Sequence[Any] = (), truncated: Truncated = None
    ) -> list[str | None]:
        """The letter of each rollout, None where there is none."""
        texts = self.said(completions, prompts, truncated)
        return [self.choice(text, prompt) for text, prompt in zip_longest(texts, prompts[: len(texts)], fillvalue="")]

    def choice(self, text: str, prompt: Any = "") -> str | None:
        """The letter that a rollout settles on, a capital; None if there is none, or more than one.

        Args:
            text: of the rollout.
            prompt: a text or a conversation; a rollout that repeats one of its options and says no more has its letter.
        """
        for settled in (last_boxed(text), take_answer(text, "tag")):
            if settled is not None:
                return self._boxed(settled)
        visible = take_answer(text, "whole") or ""
        if _ALONE.fullmatch(visible) or _is_option_of(prompt, visible):
            return self._boxed(visible)
        stated = None
        for match in _STATED.finditer(text):
            letter = match["letter"]
            marked = match["open"] or (match["mark"] and _ENDS_LINE.match(text, match.end()))
            if letter.islower() and not (self.ignore_case and marked):
                continue
            if letter in "AI" and not match["open"] and _WORD_FOLLOWS.match(text, match.end()):
                # "the answer is A number", "Answer: I think": a word, no letter.
                continue
            stated = None if _MORE.match(text, match.end()) else letter.upper()
        return stated if stated and stated in self.letters else None

    def gold(self, solution: Any) -> str | None:
        """The letter of a ``solution`` cell."""
        text = str(solution).strip()
        if self.gold_index is not None and text.isdecimal():
            number = int(text[:3]) - self.gold_index
            return self.letters[number] if 0 <= number < len(self.letters) else None
        boxed = last_boxed(text)
        return self._boxed(text if boxed is None else boxed)

    def check_golds(self, solution: Column) -> list[int]:
        """Indices of the golds that name no option."""
        return [i for i, cell in enumerate(solution) if self.gold(cell) is None]

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Refuse problems without options: a letter is no answer to them.

        Args:
            prompts: their texts.

        Raises:
            ValueError: most of them do not show the first two options.
        """
        without = [text for text in prompts if not all(mark.search(text) for mark in self._marks)]
        if 2 * len(without) > len(prompts):
            raise ValueError(
                f"The reward choice reads a letter, but {len(without)} of {len(prompts)} prompts show no options, such "
                f"as {without[0][:100]!r}. Name their column, and they stand below each problem: choices_column: "
                "choices (or one for each: A, B, C, D). Or write them into the prompts, as lines 'A. one', 'B. two'. "
                "If the prompts number them, 1) and 2), take math_verify instead: a number is the answer."
            )

    def _boxed(self, content: str) -> str | None:
        letter = boxed_letter(content)
        if letter is None or (letter.islower() and not self.ignore_case):
            return None
        return letter.upper() if letter.upper() in self.letters else None


def _is_option_of(prompt: Any, line: str) -> bool:
    """Whether a text is an option, a letter with a text behind it, and has the same words as a line of the prompt."""
    if boxed_letter(line) is None:
        return False
    turns = [prompt] if isinstance(prompt, str) else [str(turn.get("content")) for turn in prompt]
    said, *asked = (re.findall(r"\w+", text.casefold()) for text in (line, *"\n".join(turns).split("\n")))
    return said in asked


def boxed_letter(content: str) -> str | None:
    """The letter of an option, alone or with its text behind it: ``B``, ``(B) 17``, ``Choice B``; None for others."""
    match = _BOXED.match(content)
    if match is None:
        return None
    if match.end() < len(content):
        # What follows is the text of the option, which begins after a mark and names no other letter.
        separated = any(mark in match["rest"] for mark in ")]}.:") and content[match.end()] not in ",;&/|"
        other = _OTHER.match(content, match.end()) or _ANOTHER.search(content, match.end())
        is_word = other and other["letter"] in "AI" and _WORD_FOLLOWS.match(content, other.end())
        if not separated or (other and not is_word):
            return None
    return match["letter"]
