"""What a rollout says after its thought, where the model thinks first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from basis_rl.rewards.extract import completion_text, thought

_BEGIN = "<think>"
_END = "</think>"


def opens_thought(rendered: str) -> bool:
    """Whether a prompt ends with ``<think>``, so that the model's first word is one of its thought."""
    return rendered.rstrip().endswith(_BEGIN)


def after_thought(text: str, opened: bool = False) -> str:
    """What follows the last ``</think>``, or all of the text if there is no thought; empty if a thought never ends.

    Args:
        text: of a rollout.
        opened: the prompt ends with ``<think>``.
    """
    _, end, rest = text.rpartition(_END)
    return "" if _BEGIN in rest or (opened and not end) else rest


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


class AfterThought:
    """What a reward needs to leave a thought out: a parent for those that read an answer.

    Attributes:
        after_think: only what follows the thought counts. None: where the chat template or the first prompt has the
            tags, which the trainer says (`tell_template`, `tell_prompt`).
    """

    after_think: bool | None = None
    _template_thinks = False
    _template_opens = False

    @property
    def thinks(self) -> bool:
        """Whether only what follows the thought counts."""
        return self._template_thinks if self.after_think is None else self.after_think

    def tell_template(self, template: str, asks_for_box: bool) -> None:
        """Take from the chat template whether models think in it. See `basis_rl.rewards.base.Reward`."""
        self._template_thinks = self._template_thinks or _END in template

    def tell_prompt(self, rendered: str) -> None:
        """Take from the first prompt, as the model is given it, whether models think, and who opens the thought."""
        self._template_opens = opens_thought(rendered)
        self._template_thinks = self._template_thinks or _BEGIN in rendered

    def said(self, completions: Sequence[Any], prompts: Sequence[Any] = ()) -> list[str]:
        """The text of each rollout, without its thought where that does not count."""
        texts = [completion_text(completion) for completion in completions]
        if not self.thinks:
            return texts
        opened = [self._template_opens] * len(texts)
        for i, prompt in enumerate(prompts[: len(texts)]):
            if isinstance(prompt, str):
                opened[i] = opens_thought(prompt)
        # A response schema has taken the thought out.
        taken = [thought(completion) is not None for completion in completions]
        return [after_thought(text, opened[i] and not taken[i]) for i, text in enumerate(texts)]

    def _with_thought(self, version: str) -> str:
        return f"{version}, after the thought" if self.thinks else version
