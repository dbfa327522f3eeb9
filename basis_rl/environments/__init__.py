"""Environments, as TRL's `environment_factory` takes them: what a recipe names, and one episode without a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from basis_rl.names import did_you_mean, import_object
from basis_rl.rewards.call import awaited, call, said_where, scores_of

Factory = Callable[[], Any]
# Methods that the model cannot call.
NO_TOOLS = ("reset", "get_reward")
# What a tool is called with, by the types of its JSON schema.
_MADE_UP = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
# What a rollout of a row without a prompt begins with, as in TRL.
NO_PROMPT = ({"role": "user", "content": ""},)


@dataclass(frozen=True)
class Episode:
    """One episode, in which each tool is called once with arguments that are made up from its type hints.

    Attributes:
        name: of the environment's class.
        tools: JSON schemas, as a chat template is given them.
        prompt: the messages that the model is given first.
        completion: calls, answers, and a last turn.
        rewards: by the names of their functions; NaN where there is none.
        owns_reward: whether the environment has a `get_reward`.
        reward_range: as its class declares it, or None.
        columns: see `reset_columns`.
        repeats: whether a second reset with the same row says the same.
    """

    name: str
    tools: list[dict[str, Any]]
    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    rewards: dict[str, float]
    owns_reward: bool
    reward_range: tuple[float, float] | None
    columns: frozenset[str] | None
    repeats: bool


def build_environment(named: str | Mapping[str, str], params: Mapping[str, Any]) -> Factory | dict[str, Factory]:
    """What makes the environment at ``module:attribute``, a class or a function; of a mapping, one for each name.

    Args:
        named: of one environment, or of several by their names in the dataset's column ``environment``.
        params: arguments; with a mapping ``{name: arguments}``.

    Raises:
        ValueError: it cannot be imported or called, or the arguments do not fit.
    """
    if isinstance(named, str):
        return _factory(named, params)
    if unknown := [name for name in params if name not in named]:
        hint = did_you_mean(unknown[0], named)
        raise ValueError(f"environment_kwargs: '{unknown[0]}' is none of the environments {', '.join(named)}.{hint}")
    return {name: _factory(place, params.get(name) or {}) for name, place in named.items()}


def _factory(place: str, params: Mapping[str, Any]) -> Factory:
    found = import_object(place, "environment")
    try:
        inspect.signature(found).bind(**params)
    except TypeError as error:
        raise ValueError(f"environment: '{place}' cannot be called with {dict(params)}: {error}.") from error
    return partial(found, **params)


def tool_methods(environment: Any) -> list[Callable[..., Any]]:
    """The methods that the model may call, as TRL chooses them."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in members if name not in NO_TOOLS and not name.startswith("_")]
    return [getattr(environment, name) for name in names]


def with_said(prompt: list[dict[str, Any]], said: Any) -> list[dict[str, Any]]:
    """A prompt with what ``reset`` says after the text or the parts of its last message, as TRL joins them."""
    if said is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(said, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(said, str) and isinstance(content, list):
        said = [{"type": "text", "text": said}]
    return [*prompt[:-1], {**prompt[-1], "content": content + said}]


def reset_columns(factory: Factory) -> frozenset[str] | None:
    """The columns that an environment's ``reset`` names; None, for all, if it has nothing but ``**row``."""
    made = getattr(factory, "func", factory)
    is_class = isinstance(made, type)
    reset = getattr(made if is_class else factory(), "reset", None)
    # TRL refuses it.
    if reset is None:
        return frozenset()
    # Without `self`.
    parameters = list(inspect.signature(reset).parameters.values())[is_class:]
    named = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - {"prompt"}
    return frozenset(named) if named or not parameters else None


def play(factory: Factory, row: Mapping[str, Any], rewards: Sequence[Callable[..., Any]] = ()) -> Episode:
    """One episode of a new environment, without a model.

    Args:
        factory: makes it.
        row: of the dataset, which it is reset with.
        rewards: reward functions that score the episode, beside the environment's own.

    Raises:
        ValueError: it cannot be made, reset or rewarded, or a model cannot be told how to call a tool.
    """
    with _blaming(f"'{getattr(getattr(factory, 'func', factory), '__name__', factory)}' cannot be made"):
        environment = factory()
    name = type(environment).__name__
    with _blaming(f"'{name}.reset' with the columns {', '.join(row) or 'of no row'}"):
        said = environment.reset(**row)
        prompt = with_said(row.get("prompt", list(NO_PROMPT)), said)
    methods = tool_methods(environment)
    with _blaming(f"a model cannot be told how to call the tools of '{name}'"):
        tools = [get_json_schema(method) for method in methods]
    completion = [message for pair in zip(methods, tools, strict=True) for message in _called(*pair)]
    completion.append({"role": "assistant", "content": "This is my answer."})
    scores = {}
    if owns_reward := hasattr(environment, "get_reward"):
        with _blaming(f"'{name}.get_reward'"):
            (scores[name],), _ = scores_of([awaited(environment.get_reward())], 1)
    given = {**row, "prompt": prompt, "environments": environment}
    for function in rewards:
        key = getattr(function, "__name__", type(function).__name__)
        (scores[key],) = call(function, [given], [(completion, [0], False)])
    columns = reset_columns(lambda: environment)
    reward_range = getattr(environment, "reward_range", None)
    repeats = environment.reset(**row) == said
    return Episode(name, tools, prompt, completion, scores, owns_reward, reward_range, columns, repeats)


def _called(method: Callable[..., Any], schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A call of a tool with made-up arguments, and its answer; an exception is an answer, as in TRL."""
    parameters = schema["function"]["parameters"]
    wanted = {name: parameters["properties"][name] for name in parameters.get("required", ())}
    arguments = {
        key: (each.get("enum") or [_MADE_UP.get(str(each.get("type")), "a")])[0] for key, each in wanted.items()
    }
    name = schema["function"]["name"]
    try:
        answer = awaited(method(**arguments))
    except Exception as error:
        answer = {"error": str(error)}
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    yield {"role": "assistant", "content": "", "tool_calls": [called]}
    yield {"role": "tool", "name": name, "content": str(answer)}


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Within it any exception becomes a ValueError that says `what` and where."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"environment: {what}: {said_where(error)}") from error
