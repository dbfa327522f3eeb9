"""The reward of a rollout's form: is the thought closed, is the answer where it belongs?"""

from __future__ import annotations

from typing import Any, Literal

import regex  # type: ignore[import-untyped]

from basis_rl.registry import Positive, checked
from basis_rl.rewards.base import Column, Completions, LogMetric, Reward, Scores, log_shares
from basis_rl.rewards.extract import completion_text, is_blank, last_boxed, thought
from basis_rl.rewards.thought import is_opened, opens_thought

Form = Literal["think", "think_box", "think_answer", "box", "answer"]
_RULES = 4


class FormatReward(Reward):
    r"""1.0 if the rollout has the form that is asked for, else 0.0. What the answer is does not matter.

    - ``think``: ``<think>thought</think>visible text``, with each tag once, nothing before it, and neither part blank;
    - ``think_box``: the same, with a ``\boxed{...}`` that is not blank in the visible text;
    - ``think_answer``: the same, where the visible text is one ``<answer>...</answer>`` that is not blank (DeepSeek-R1,
      arXiv 2501.12948, Table 1; Open-Reasoner-Zero);
    - ``box``, ``answer``: a box anywhere; one ``<answer>...</answer>``, at the end.

    Metric with a pattern: ``reward/format/timeout``, a share of the rollouts.

    Args:
        form: one of the above; default ``think_box``.
        pattern: instead, a regular expression (of the package regex) for the whole rollout, without white space at its
            ends; ``.`` matches line ends too.
        opened_by_prompt: the prompt ends with ``<think>``, so rollouts have no opening tag. None: read from the prompt.
        timeout: seconds for one rollout with `pattern`, which may take exponential time; a match that takes longer is
            none.

    Raises:
        ValueError: unknown form, form and pattern, a pattern that is not a regular expression.
    """

    __name__ = "format_reward"
    reward_range = (0.0, 1.0)

    @checked("format")
    def __init__(
        self,
        form: Form | None = None,
        pattern: str | None = None,
        opened_by_prompt: bool | None = None,
        timeout: Positive = 1.0,
    ) -> None:
        if form is not None and pattern is not None:
            raise ValueError("format: set form or pattern, not both.")
        self.form: Form = "think_box" if form is None else form
        self.timeout = timeout
        self.pattern = pattern
        self.opened_by_prompt = opened_by_prompt
        try:
            self._pattern = None if pattern is None else regex.compile(pattern, regex.DOTALL)
        except (regex.error, TypeError) as error:
            raise ValueError(f"format: pattern {pattern!r} is not a regular expression: {error}.") from error
        self._template_opens = False

    @property
    def version(self) -> str:  # type: ignore[override]
        """What counts as right."""
        opens = self._template_opens if self.opened_by_prompt is None else self.opened_by_prompt
        opened = ", opened by the prompt" if opens and self.pattern is None else ""
        return f"rules {_RULES}, {self.form if self.pattern is None else repr(self.pattern)}{opened}"

    def tell_prompt(self, rendered: str) -> None:
        """Take from a conversation, as the model is given it, whether the chat template opens the thought."""
        self._template_opens = opens_thought(rendered)

    def __call__(
        self, prompts: Column, completions: Completions, log_metric: LogMetric = None, **kwargs: Any
    ) -> Scores:
        opened = [self._is_opened(prompts[i : i + 1]) for i in range(len(completions))]
        texts = [_whole(completion, after) for completion, after in zip(completions, opened, strict=True)]
        if self._pattern is None:
            return [float(has_form(text, self.form, after)) for text, after in zip(texts, opened, strict=True)]
        found = list(map(self._matches, texts))
        log_shares(log_metric, "format", {"timeout": found.count(None)}, len(found))
        return [float(bool(matches)) for matches in found]

    def _matches(self, text: str) -> bool | None:
        """Whether the pattern matches all of a text; None where it is not known in time."""
        assert self._pattern is not None
        try:
            # Other threads go on meanwhile.
            return self._pattern.fullmatch(text, timeout=self.timeout, concurrent=True) is not None
        except TimeoutError:
            return None

    def _is_opened(self, prompts: Column) -> bool:
        return is_opened(prompts, self._template_opens) if self.opened_by_prompt is None else self.opened_by_prompt


def _whole(completion: Any, opened: bool) -> str:
    """What the model wrote: a thought that a response schema has taken out is put back before the text."""
    text = completion_text(completion).strip()
    taken = thought(completion)
    return text if taken is None else f"{'' if opened else '<think>'}{taken}</think>{text}"


def has_form(text: str, form: Form, opened_by_prompt: bool = False) -> bool:
    """Whether a rollout has a form of `FormatReward`, in one pass."""
    if form.startswith("think"):
        if not opened_by_prompt and not text.startswith("<think>"):
            return False
        rest = text if opened_by_prompt else text.removeprefix("<think>")
        thought, _, visible = rest.partition("</think>")
        if is_blank(thought) or is_blank(visible) or "<think>" in rest or "</think>" in visible:
            return False
        text = visible.strip()
    if form.endswith("box"):
        return not is_blank(last_boxed(text) or "")
    if form.endswith("answer"):
        if text.count("<answer>") != 1 or text.count("</answer>") != 1 or not text.endswith("</answer>"):
            return False
        before, _, answer = text.removesuffix("</answer>").partition("<answer>")
        return not is_blank(answer) and (form == "answer" or is_blank(before))
    return True
