"""What a rollout says after its thought, where the model thinks first, and whether it came to an answer at all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from basis_rl.rewards.base import Reward, Scores, Truncated
from basis_rl.rewards.extract import completion_text, take_answer, thought

Unfinished = Literal["wrong", "unscored"]

# Where a reward looks for an answer, as a reader is told.
PLACES = {
    "box": r"reads the answer from the last \boxed{}",
    "tag": "reads the answer from the last <answer>...</answer>",
    "hashes": "reads the answer behind the last ####",
    "last_line": "reads the answer from the last line",
    "last_number": "takes the last number for the answer",
    "whole": "takes the whole rollout for the answer",
    "anywhere": "reads the answer from a box, a tag or behind ####, else from the last sentence that has one",
    "letter": r"reads the letter from the last \boxed{} or tag, else from the last statement of one",
    "code": "runs the last closed block of Python, or of no language",
}
_BEGIN = "<think>"
_END = "</think>"
# An answer up to its end, by the place where a reward looks for it; and one that is stated without a mark.
_MARKS = {"tag": "</answer>", "hashes": "####.*+", "code": r"(?m)(?:(?<!`)`{3,}+|(?<!~)~{3,}+)(?=[ \t]*+$)"}
_MARK = r"\\(?:boxed|fbox)\s*+(?:\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}?)?|</answer>"
_STATED = r"(?i)(?:\banswer(?: is\b|:)|答案)[^\n.!?。]*+"
# A sentence that begins so takes the answer before it up again; "but" after a comma does not.
_DOUBT = re.compile(
    r"(?i)(?:[^\w\s]|\n)[ \t\"*_]{0,4}(?:(?:oh|no|but|so|and|hm+),? )?(?:wait|hold on|hm+|no(?=[,.!])|maybe|perhaps"
    r"|actually|however|alternatively|on second thought|let(?: me| us|['’]s) (?:\w+[ -]){0,2}(?:check|verify|think|try"
    r"|re-?(?:calculate|check|compute|consider|do|evaluate|examine|read|think|verify|visit)))\b"
    r"|(?:[^\w\s,]|\n)[ \t\"*_]{0,4}but\b|等等|等一下|不对|但是|或者|让我"
)


def opens_thought(rendered: str) -> bool:
    """Whether a prompt ends with ``<think>``, so that the model's first word is one of its thought."""
    return rendered.rstrip().endswith(_BEGIN)


def is_opened(prompts: Sequence[Any], template_opens: bool) -> bool:
    """Whether the first of these prompts opens the thought; of a conversation, or without one, the template says so."""
    return opens_thought(prompts[0]) if prompts and isinstance(prompts[0], str) else template_opens


def after_thought(text: str, opened: bool = False) -> str:
    """What follows the last ``</think>``, or all of the text if there is no thought; empty if a thought never ends.

    Args:
        text: of a rollout.
        opened: the prompt ends with ``<think>``.
    """
    _, end, rest = text.rpartition(_END)
    return "" if _BEGIN in rest or (opened and not end) else rest


def is_unfinished(text: str, opened: bool = False, place: str = "") -> bool:
    r"""Whether a rollout that the length limit cut off broke off before its answer was final.

    Nothing follows its thought; or nothing there marks or states an answer; or a sentence behind the last one begins
    with a doubt ("But wait", "Let me check"). An answer that merely goes on ("The answer is \boxed{17}, since ...") is
    final.

    Args:
        text: of the rollout, with its thought.
        opened: the prompt ends with ``<think>``.
        place: where the answer is: a place of `take_answer`, or ``code``.
    """
    rest = after_thought(text, opened)
    answers = list(re.finditer(_MARKS.get(place, _MARK), rest)) or list(re.finditer(_STATED, rest))
    # A doubt begins behind a sign, which may be the last one of the answer.
    return not answers or _DOUBT.search(rest, answers[-1].end() - 1) is not None


def tell_rewards(rewards: Sequence[Any], rendered: Sequence[str], tokenizer: Any) -> None:
    """Tell reward functions that ask for it how the model is asked.

    Args:
        rewards: functions.
        rendered: prompts as the model is given them, at least one.
        tokenizer: whose chat template counts; or a processor.
    """
    template = getattr(tokenizer, "chat_template", None)
    text = "\n".join(template.values()) if isinstance(template, dict) else template or ""
    for reward in rewards:
        if hasattr(reward, "tell_prompt"):
            reward.tell_prompt(rendered[0])
        if hasattr(reward, "tell_template"):
            reward.tell_template(text, any(r"\boxed" in prompt for prompt in rendered))


class AfterThought(Reward):
    """What a reward needs to leave a thought out: a parent for those that read an answer.

    Attributes:
        after_think: only what follows the thought counts. None: where the chat template or the first prompt has the
            tags, which the trainer says (`tell_template`, `tell_prompt`). False: all of the rollout is read as it is,
            also where it is unfinished.
        unfinished: the score of rollouts that the length limit cut off before their answer (`is_unfinished`, or there
            is none): 0 if ``wrong``, None if ``unscored``.
    """

    after_think: bool | None = None
    unfinished: Unfinished = "wrong"
    answer_in: Any
    _stated: str
    _template_thinks = False
    _template_opens = False

    @property
    def thinks(self) -> bool:
        """Whether only what follows the thought counts."""
        return self._template_thinks if self.after_think is None else self.after_think

    @property
    def version(self) -> str:  # type: ignore[override]
        """What counts as right."""
        return self._with_thought(self._stated)

    @property
    def reading(self) -> str:
        """What of a rollout is graded, in words."""
        what = self._told_place()
        return f"{what}; what stands before </think> does not count" if self.thinks else what

    def _told_place(self) -> str:
        place = getattr(self, "place", getattr(self, "answer_in", ""))
        return PLACES.get(place, "reads the answer in a way of its own")

    def tell_template(self, template: str, asks_for_box: bool) -> None:
        """Take from the chat template whether models think in it. See `basis_rl.rewards.base.Reward`."""
        self._template_thinks = self._template_thinks or _END in template

    def tell_prompt(self, rendered: str) -> None:
        """Take from the first prompt, as the model is given it, whether models think, and who opens the thought."""
        self._template_opens = opens_thought(rendered)
        self._template_thinks = self._template_thinks or _BEGIN in rendered

    def said(self, completions: Sequence[Any], prompts: Sequence[Any] = (), truncated: Truncated = None) -> list[str]:
        """The text of each rollout, without its thought where that does not count; empty if it is unfinished.

        Args:
            completions: rollouts.
            prompts: theirs; where there are none, the first prompt says who opens the thought (`tell_prompt`).
            truncated: which rollouts the length limit cut off. None is not known: then only open thoughts have no
                answer, where thoughts do not count.
        """
        place = getattr(self, "place", getattr(self, "answer_in", ""))
        texts = []
        for i, completion in enumerate(completions):
            text = completion_text(completion)
            # Unless a response schema has taken the thought out.
            opened = thought(completion) is None and is_opened(prompts[i : i + 1], self._template_opens)
            cut = self.after_think is not False and truncated is not None and truncated[i]
            said = after_thought(text, opened) if self.thinks else text
            texts.append("" if cut and is_unfinished(text, opened, place) else said)
        return texts

    def answers(
        self, completions: Sequence[Any], prompts: Sequence[Any] = (), truncated: Truncated = None
    ) -> list[str | None]:
        """The answer of each rollout, None where there is none; the arguments are those of `said`."""
        return [self._answer(text) for text in self.said(completions, prompts, truncated)]

    def _answer(self, text: str) -> str | None:
        return take_answer(text, self.answer_in)

    def _set_thought(self, after_think: bool | None, unfinished: Unfinished) -> None:
        self.after_think = after_think
        self.unfinished = unfinished

    def _settled(self, scores: Scores, answers: Sequence[Any], truncated: Truncated) -> Scores:
        """The scores; None for rollouts that were cut off before their answer, if these are not to be scored."""
        if self.unfinished == "wrong" or self.after_think is False or truncated is None:
            return scores
        ends = zip(scores, answers, truncated, strict=True)
        return [None if cut and answer is None else score for score, answer, cut in ends]

    def _with_thought(self, version: str) -> str:
        version = version if self.unfinished == "wrong" else f"{version}, unfinished {self.unfinished}"
        return f"{version}, after the thought" if self.thinks else version
