"""The reward of a rollout's form: is the thought closed, is the answer where it belongs?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from basis_rl.registry import check_choice
from basis_rl.rewards.base import Column, Completions, LogMetric, Reward, Scores
from basis_rl.rewards.extract import completion_text, is_blank, last_boxed, thought
from basis_rl.rewards.thought import is_opened, opens_thought
from basis_rl.rewards.workers.calls import Calls, check_limits

Form = Literal["think", "think_box", "think_answer", "box", "answer"]
_RULES = 3
_MEMORY_BYTES = 1 << 30


class FormatReward(Reward):
    r"""1.0 if the rollout has the form that is asked for, else 0.0. What the answer is does not matter.

    - ``think``: ``<think>thought</think>visible text``, with each tag once, nothing before it, and neither part blank;
    - ``think_box``: the same, with a ``\boxed{...}`` that is not blank in the visible text;
    - ``think_answer``: the same, where the visible text is one ``<answer>...</answer>`` that is not blank (DeepSeek-R1,
      arXiv 2501.12948, Table 1; Open-Reasoner-Zero);
    - ``box``, ``answer``: a box anywhere; one ``<answer>...</answer>``, at the end.

    Metrics with a pattern: ``reward/format/timeout`` and the like, shares of the rollouts.

    Args:
        form: one of the above; default ``think_box``.
        pattern: instead, a regular expression for the whole rollout, without white space at its ends; ``.`` matches
            line ends too. It may take exponential time, so it is matched in a worker.
        opened_by_prompt: the prompt ends with ``<think>``, so rollouts have no opening tag. None: read from the prompt.
        num_workers: processes of this rank for `pattern`.
        timeout: seconds of CPU time for one rollout with `pattern`; a match that takes longer is none.

    Raises:
        ValueError: unknown form, form and pattern, a pattern that is not a regular expression.
    """

    __name__ = "format_reward"
    reward_range = (0.0, 1.0)

    def __init__(
        self,
        form: Form | None = None,
        pattern: str | None = None,
        opened_by_prompt: bool | None = None,
        num_workers: int = 2,
        timeout: float = 1.0,
    ) -> None:
        if form is not None and pattern is not None:
            raise ValueError("format: set form or pattern, not both.")
        self.form: Form = "think_box" if form is None else form
        check_choice("format", "form", self.form, Form)
        check_limits("format", num_workers, timeout, _MEMORY_BYTES)
        self.pattern = pattern
        self.opened_by_prompt = opened_by_prompt
        self._calls: Calls | None = None
        if pattern is not None:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(f"format: pattern {pattern!r} is not a regular expression: {error}.") from error
            scorer = Path(__file__).with_name("pattern_scorer.py")
            self._calls = Calls("format", f"{scorer}:matches", num_workers, timeout, _MEMORY_BYTES)
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
        if self._calls is None:
            return [float(has_form(text, self.form, after)) for text, after in zip(texts, opened, strict=True)]
        return self._calls.run([([text, self.pattern], {}) for text in texts], log_metric)

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
