"""What is checked of tools before a model is loaded, and tools as TRL wants them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from datasets import Dataset
from transformers.utils import get_json_schema
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)

from basis_rl.tools import ToolResult
from basis_rl.trainer.config import BasisConfig


class Pending(str):
    """A tool's answer that is still being worked on.

    TRL makes a string (``str()``) of what a tool returns, and calls the next one; this one stays what it is.
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
        ValueError: something is no tool, or two have one name.
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
            signature.bind(**arguments)  # a TypeError is the model's to see
            return Pending(tool.start(**arguments))

        function.__name__ = name
        function.__signature__ = signature  # type: ignore[attr-defined]
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


def check_tools(tools: Sequence[Any], tokenizer: Any, dataset: Any, args: BasisConfig, ranks: int) -> None:
    """Dataset and chat template can do with tools.

    Args:
        tools: of the run.
        tokenizer: None if it is not known yet.
        dataset: the training set.
        args: settings.
        ranks: of the run.

    Raises:
        ValueError: they cannot, or settings contradict.
    """
    if not tools:
        if args.filter_void_turns:
            raise ValueError("filter_void_turns is about turns that call a tool or answer: it needs tools.")
        return
    if args.max_tool_calling_iterations is not None and args.max_tool_calling_iterations < 1:
        raise ValueError(
            f"max_tool_calling_iterations must be at least 1, got {args.max_tool_calling_iterations}. Leave tools out "
            "for single turns."
        )
    if isinstance(dataset, Dataset) and len(dataset):
        if isinstance(dataset[0].get("prompt"), str):
            raise ValueError(
                "tools need conversational prompts (lists of messages), but the dataset's are text. The loader makes "
                "messages where the tokenizer has a chat template: take a model that has one."
            )
        if ranks > 1 and {"image", "images"} & set(dataset.column_names):
            raise ValueError("tools with images work on one process only. Leave one of them out.")
    if tokenizer is not None:
        check_template(tokenizer)


def check_template(tokenizer: Any) -> None:
    """The chat template renders calls and answers, calls can be read back, and earlier turns stay as they are.

    Raises:
        ValueError: it does not.
    """
    way_out = "Take a model that was trained to call tools (Qwen2.5 and Qwen3 do), or set a template that does."
    if not supports_tool_calling(tokenizer):
        raise ValueError(f"tools: the model's chat template does not show tool calls and their answers. {way_out}")
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    known = getattr(inner, "response_template", None) or getattr(inner, "response_schema", None)
    try:
        if not known:
            add_response_schema(copy.copy(tokenizer))
        if not is_chat_template_prefix_preserving(tokenizer):
            get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ValueError(f"tools: {error} {way_out}") from error
