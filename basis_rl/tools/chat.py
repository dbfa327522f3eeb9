"""A chat template with tools, for models whose own has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# What the template writes around turns.
_MARKS = {"<|im_start|>", "<|im_end|>"}


def chat_template(name: str, tokenizer: Any) -> str:
    """The template with calls of tools that comes with the package, for the name ``tools``, or the one in a file.

    Raises:
        ValueError: there is no such file, or the tokenizer has not the tokens that ours writes.
    """
    path = Path(__file__).with_name("chat.jinja") if name == "tools" else Path(name)
    if not path.is_file():
        raise ValueError(f"chat_template: there is no file '{name}'; `tools` is the template that comes with basis-rl.")
    if name == "tools" and not tokenizer.get_vocab().keys() >= _MARKS:
        needs = f"`tools` needs the tokens {' and '.join(sorted(_MARKS))}, which the tokenizer does not have"
        raise ValueError(f"chat_template: {needs}. Name a file with a Jinja template for this model.")
    return path.read_text(encoding="utf-8")
