"""Checks of prompts and golds before anything is spent; of a stream, its first rows are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from basis_rl.data import problem_text
from basis_rl.data.prompts import IMAGES
from basis_rl.values.provenance import rendered_prompt


def first_rows(dataset: Any, most: int) -> Dataset | None:
    """The rows of a dataset, of a stream the first `most`; None if it is neither, or a stream without rows."""
    if isinstance(dataset, IterableDataset):
        # Images are not checked, and `from_list` would encode them.
        rows = [{key: None if key in IMAGES else value for key, value in row.items()} for row in dataset.take(most)]
        return Dataset.from_list(rows) if rows else Dataset.from_dict({})
    return dataset if isinstance(dataset, Dataset) else None


def check_prompts(prompts: Sequence[Any], what: str) -> None:
    """Each prompt asks something, and leaves the next turn to the model.

    Raises:
        ValueError: one does not; says which.
    """
    for index, prompt in enumerate(prompts):
        fault = _fault(prompt)
        if fault is not None:
            raise ValueError(f"{what}: the prompt of row {index} {fault}; it is {str(prompt)[:100]!r}.")


def _fault(prompt: Any) -> str | None:
    """What is wrong with a prompt, and the way out."""
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        return "is empty: leave the row out"
    if isinstance(prompt, str):
        return None
    if any(message.get("content") is None and not message.get("tool_calls") for message in prompt):
        return "has a message whose content is None, which templates write as text: give it a text, or leave it out"
    if prompt[-1]["role"] == "assistant":
        return "ends with a turn of the assistant, which is the model's to write: end with the user's turn"
    contents = [message.get("content") for message in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if not problem_text(prompt) and all(part.get("type") == "text" for part in parts):
        return "has no text of a user: leave the row out"
    return None


def check_template(rows: Dataset, tokenizer: Any, template: Mapping[str, Any], what: str) -> None:
    """The tokenizer makes of each prompt what the model was trained to read.

    Args:
        rows: with the column ``prompt``.
        tokenizer: or a processor.
        template: what the chat template is given besides the conversation.
        what: the dataset, as messages call it.

    Raises:
        ValueError: it does not; says of which prompt.
    """
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if inner is tokenizer and IMAGES & set(rows.column_names):
        raise ValueError(
            f"{what} has the column {sorted(IMAGES & set(rows.column_names))}, which TRL takes for pictures, but the "
            "model has a tokenizer and no processor. Rename it, or take a model that reads images."
        )
    for index, prompt in enumerate(rows["prompt"]):
        if isinstance(prompt, str):
            fault = _text_fault(inner, prompt)
        elif inner is tokenizer:
            fault = _conversation_fault(tokenizer, prompt, template)
        else:
            fault = None
        if fault is not None:
            raise ValueError(f"{what}: the prompt of row {index} {fault}; it is {str(prompt)[:100]!r}.")


def _text_fault(tokenizer: Any, prompt: str) -> str | None:
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        return "has no tokens: leave the row out"
    if ids[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
        return "would end with the end token, which the tokenizer appends: set its add_eos_token to False"
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        return f"would begin with {tokenizer.bos_token} twice, since the tokenizer adds one: take it out of the text"
    return None


def _conversation_fault(tokenizer: Any, prompt: Any, template: Mapping[str, Any]) -> str | None:
    if tokenizer.chat_template is None:
        return (
            "is a conversation, but the tokenizer has no chat template: give texts (in a recipe: prompt_template: "
            "'{prompt}'), or set tokenizer.chat_template"
        )
    rendered = render_prompt(tokenizer, prompt, template)
    plain = [{**message, "content": _joined(message.get("content"))} for message in prompt]
    if plain != prompt and rendered != render_prompt(tokenizer, plain, template):
        return "has content in parts, which the chat template does not read as text: give each message one text"
    return None


def _joined(content: Any) -> Any:
    """The text of content in parts of text."""
    parts = isinstance(content, list) and all(part.get("type") == "text" for part in content)
    return "".join(part["text"] for part in content) if parts else content


def render_prompt(tokenizer: Any, prompt: Any, template: Mapping[str, Any]) -> str:
    """A prompt as the model is given it.

    Raises:
        ValueError: the chat template refuses it.
    """
    try:
        return rendered_prompt(prompt, tokenizer, template)
    except Exception as error:
        # A template is a program: it may refuse, divide by zero, count for ever (OverflowError of the sandbox) or reach
        # for what the sandbox keeps from it.
        system = "" if isinstance(prompt, str) or prompt[0]["role"] != "system" else (
            " If it has no system role, put the system message (system_prompt) into the user's turn."
        )  # fmt: skip
        raise ValueError(
            f"The chat template cannot write the prompt {str(prompt)[:100]!r} ({type(error).__name__}: {error})."
            f"{system}"
        ) from error
