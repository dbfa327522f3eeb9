"""Checks of tools before a model is loaded, and tools in the form that TRL expects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from datasets import Dataset
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import get_json_schema
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    qwen3_template,
    supports_tool_calling,
)

from basis_rl.tools import ToolResult
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.generation_check import generation_kwargs_of


class Pending(str):
    """The answer of a tool that is still running.

    TRL calls ``str()`` on what a tool returns and turns to the next call: this object is still itself afterwards.
    """

    answer: Future[ToolResult]

    def __new__(cls, answer: Future[ToolResult]) -> Pending:
        made = super().__new__(cls, "(the answer is not there yet)")
        made.answer = answer
        return made

    def __str__(self) -> str:
        return self


def as_functions(tools: Sequence[Any] | None) -> list[Callable[..., Any]]:
    """Tools as TRL and chat templates take them: functions. Those that can run at the same time (`start`) return a
    `Pending`.

    Raises:
        ValueError: something is not a tool, or two tools have the same name.
    """
    functions = [_as_function(tool) for tool in tools or []]
    names = [function.__name__ for function in functions]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"tools: several are called {', '.join(sorted(twice))}. The model calls them by their names.")
    return functions


def _as_function(tool: Any) -> Callable[..., Any]:
    name = getattr(tool, "__name__", type(tool).__name__)
    if not callable(tool):
        raise ValueError(f"tools: {tool!r} cannot be called. A tool is a function with type hints and a docstring.")
    function: Callable[..., Any] = tool
    if hasattr(tool, "start"):
        signature = inspect.signature(tool.__call__)

        @functools.wraps(type(tool).__call__)
        def function(**arguments: Any) -> Pending:
            # Wrong arguments raise a TypeError here, which TRL shows to the model.
            signature.bind(**arguments)
            return Pending(tool.start(**arguments))

        function.__name__ = name
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.isolation = getattr(tool, "isolation", None)  # type: ignore[attr-defined]
    elif not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise ValueError(f"tools: '{name}' is neither a function nor an object with a method `start`.")
    try:
        get_json_schema(function)
    except Exception as error:
        raise ValueError(
            f"tools: the model cannot be told how to call '{name}': {error} A tool needs type hints and a docstring "
            "with an `Args:` section (see basis_rl/tools/calculator.py)."
        ) from error
    return function


def check_tools(tools: Sequence[Any], tokenizer: Any, dataset: Any, args: BasisConfig) -> None:
    """Dataset and chat template work with tools.

    Args:
        tools: of the run.
        tokenizer: None if it is not known yet.
        dataset: the training set.
        args: settings.

    Raises:
        ValueError: they cannot, or settings contradict.
    """
    if not tools:
        if args.filter_void_turns:
            raise ValueError(
                "filter_void_turns needs tools: it leaves out rollouts with a turn that neither calls one nor answers. "
                "Set tools, or leave filter_void_turns out."
            )
        return
    if isinstance(dataset, Dataset) and len(dataset):
        if isinstance(dataset[0].get("prompt"), str):
            raise ValueError(
                "tools need conversational prompts (lists of messages), but the dataset's are text. The loader makes "
                "messages where the tokenizer has a chat template: take a model that has one."
            )
        if args.world_size > 1 and {"image", "images"} & set(dataset.column_names):
            raise ValueError("tools with images work on one process only. Leave one of them out.")
    if tokenizer is not None:
        prepare_tokenizer(tokenizer, args)


def prepare_tokenizer(tokenizer: Any, args: BasisConfig) -> None:
    """Let calls be read back, and turns end where the chat template ends them.

    Templates that write calls as Qwen's do are known whatever else is in them; TRL knows only those that are the same
    to the letter. Base models end texts with another token than the template's turns (Qwen2.5: ``<|endoftext|>``): the
    turn's becomes the tokenizer's end token, and one at which vLLM stops.

    Raises:
        ValueError: the template does not show calls and answers, they cannot be read back, or earlier turns are
            rendered otherwise when others follow.
    """
    way_out = (
        "Take a model that was trained to call tools (Qwen2.5 and Qwen3 are), or set a template that shows them: in a "
        "recipe `chat_template: tools`, in Python tokenizer.chat_template = basis_rl.tools.chat_template('tools', "
        "tokenizer). The model then has to learn the form of a call."
    )
    if not supports_tool_calling(tokenizer):
        raise ValueError(f"tools: the model's chat template does not show tool calls and their answers. {way_out}")
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    try:
        if not (getattr(inner, "response_template", None) or getattr(inner, "response_schema", None)):
            if _reads_back(inner, qwen3_template):
                inner.response_template = qwen3_template
            else:
                add_response_schema(tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ValueError(f"tools: {error} {way_out}") from error
    end = end_of_turn(inner)
    if end is not None and end != inner.eos_token_id:
        inner.eos_token = inner.convert_ids_to_tokens(end)
        if args.use_vllm:
            settings = generation_kwargs_of(args)
            settings["stop_token_ids"] = sorted({*settings.get("stop_token_ids", []), end})
            args.generation_kwargs = settings


_CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"what": 'one "word"'}}}
_QUESTION = {"role": "user", "content": "Why?"}


def _reads_back(tokenizer: Any, response_template: dict[str, Any]) -> bool:
    """Whether a call that the chat template writes is read by `response_template` as what it was."""
    turn = {"role": "assistant", "content": "So.", "tool_calls": [_CALL]}
    try:
        before: str = tokenizer.apply_chat_template([_QUESTION], add_generation_prompt=True, tokenize=False)
        whole: str = tokenizer.apply_chat_template([_QUESTION, turn], tokenize=False)
        start = len(before) if whole.startswith(before) else whole.rfind("So.")
        found = tokenizer.parse_response(whole[start:], response_template, prefix=before)
    # Some templates take the arguments of a call as text only.
    except (ValueError, TypeError, TemplateError):
        return False
    return bool(found.get("tool_calls") == [_CALL])


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token with which the chat template ends the model's turns; None if it has none."""
    turn = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    try:
        ids = tokenizer.apply_chat_template([_QUESTION, turn], return_dict=False)
    except (TypeError, TemplateError):
        return None
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for token in reversed(ids):
        if token in special:
            return int(token)
        if tokenizer.decode([token]).strip():
            return None
    return None
