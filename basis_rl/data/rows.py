"""Reads one row of a data set: the bare problem and its gold, in whatever form the set has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from basis_rl.identity import canonical

# Instructions that sets carry in the problem itself. They would double the prompt template, and change the prompt's id.
_INSTRUCTIONS = (
    re.compile(
        r"\A\s*Solve the following math problem step by step\. The last line of your response should be of the form "
        r"Answer: \\?\$Answer \(without quotes\) where \\?\$Answer is the answer to the problem\.\s*"
    ),
    re.compile(r'\s*Remember to put your answer on its own line after "?Answer:"?\.?\s*$'),
    re.compile(r"\s*Please reason step by step,? and put your final answer within \\boxed\{\}\.?\s*$"),
    re.compile(
        r"\s*Let'?s think step by step and output the final answer (within \\boxed\{\}|after \"?####\"?)\.?\s*$"
    ),
)
_GSM8K = re.compile(r"(?:^|\n)####[ \t]*(\S[^\n]*)\Z")


def problem_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """What is asked: the prompt itself, or what the user says in a conversation (text parts only)."""
    if isinstance(prompt, str):
        return prompt.strip()
    said: list[str] = []
    for message in prompt:
        if message["role"] == "user":
            content = message["content"]
            said += [content] if isinstance(content, str) else [part.get("text") or "" for part in content or []]
    return "\n".join(said).strip()


def without_answer(value: Any) -> Any:
    """A conversation without turns of the assistant at its end, which data of supervised training has; else `value`."""
    turns = list(value) if isinstance(value, list) else []
    while turns and isinstance(turns[-1], Mapping) and turns[-1].get("role") == "assistant":
        turns.pop()
    return turns if turns and len(turns) < len(value) else value


def is_blank(value: Any) -> bool:
    """Whether nothing is in a cell: None, a text of white space, or a conversation without turns."""
    return value is None or not (value.strip() if isinstance(value, str) else value != [])


def is_single_turn(prompt: Any) -> bool:
    """Whether it is a text, or a conversation in which a user speaks once and nobody else but the system."""
    return isinstance(prompt, str) or [m["role"] for m in prompt if m["role"] != "system"] == ["user"]


def bare_problem(value: Any, *, strip_instructions: bool = True) -> str | None:
    """The problem in a cell that holds text or a conversation with a user's turn; None if it holds neither.

    It is what the user says. With `strip_instructions` the instructions on the form of the answer that DAPO, verl and
    others put around the problem are left out.
    """
    if not isinstance(value, str):
        if not isinstance(value, list) or not all(isinstance(m, Mapping) and "role" in m for m in value):
            return None
        if not any(m["role"] == "user" for m in value):
            return None
    text = problem_text(value)
    if strip_instructions:
        for pattern in _INSTRUCTIONS:
            text = pattern.sub("", text)
    return text.strip() or None


def gold_text(value: Any) -> str | None:
    r"""The gold in a cell, as text; None if there is none.

    The answers of a list are joined by commas (all of them are asked for), a record is JSON without keys that are None,
    ``27.0`` is ``27``, and of a worked solution whose last line is GSM8K's ``#### 72`` only what follows the mark is
    taken.
    """
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value)):
        return json.dumps(canonical(value), ensure_ascii=False)
    if isinstance(value, list):
        answers = [gold_text(item) for item in value]
        return None if not answers or None in answers else ", ".join(a for a in answers if a is not None)
    if value is None or value != value:
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    marked = _GSM8K.search(text.rstrip())
    return marked.group(1) if marked else text
