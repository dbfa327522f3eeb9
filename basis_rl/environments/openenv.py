"""Environments of OpenEnv servers: their tools as methods, their reset, their rewards."""

from __future__ import annotations

import functools
import json
import logging
import weakref
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

import requests
from datasets import Dataset

from basis_rl.environments.mcp import tool_method
from basis_rl.identity import prompt_id
from basis_rl.names import require_extra
from basis_rl.run.http import BoundedSession
from basis_rl.text import printable

# What a server answers to an action that the environment refuses; anything else is a failure of the server.
_REFUSED = ("VALIDATION_ERROR", "EXECUTION_ERROR")
# Seconds that the server may take to say what it has.
_PATIENCE = 60.0
_log = logging.getLogger(__name__)


def dataset(resets: Iterable[Mapping[str, Any]], prompt: str = "", system_prompt: str | None = None) -> Dataset:
    """One row for each episode that can be begun.

    Args:
        resets: arguments of the environment's ``reset``, such as ``{"seed": 0}``; see also `tasks`.
        prompt: what the user says before that which ``reset`` says.
        system_prompt: the system message.

    Returns:
        Columns ``prompt`` (a conversation), ``reset`` (the arguments as JSON) and ``prompt_id``.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages = [*system, {"role": "user", "content": prompt}]
    texts = [json.dumps(dict(each), sort_keys=True) for each in resets]
    return Dataset.from_list(
        [{"prompt": messages, "reset": text, "prompt_id": prompt_id(messages, {"reset": text})} for text in texts]
    )


def tasks(base_url: str, split: str = "train") -> list[dict[str, Any]]:
    """The arguments of ``reset`` for each task of a split, of a server with OpenEnv's Task API.

    Raises:
        ValueError: it does not answer, or its environment has no tasks or no such split.
    """
    try:
        (name,) = _asked("GET", f"{base_url}/list_environments")
        count = int(_asked("POST", f"{base_url}/{name}/num_tasks", {"split": split})["num_tasks"])
    except (requests.RequestException, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"The OpenEnv server at {base_url} lists no tasks of the split '{split}': {printable(str(error))}. If its "
            "environment has none, give `dataset` the arguments of its reset yourself, such as seeds."
        ) from error
    return [{"split": split, "index": index} for index in range(count)]


def environment(
    base_url: str,
    text_field: str | None = None,
    turn_rewards: bool = False,
    timeout: float = 60.0,
) -> Any:
    """An environment for TRL's ``environment_factory`` that plays on an OpenEnv server, in a session of its own.

    Its tools are those that the server lists. A server of another kind has one tool, ``act``, whose arguments are the
    fields of its actions. The reward is the sum of those of the steps; without a step it is 0. An episode in which the
    server fails has no reward. The session begins with the first reset, and the server must allow as many at a time as
    a batch has rollouts (``max_concurrent_envs``).

    Args:
        base_url: of the server, ``http://127.0.0.1:8000``.
        text_field: the field of observations that is the text for the model, ``board`` or ``metadata.question``; by
            default all fields but metadata, as JSON if there are several.
        turn_rewards: whether the reward is a list with one number for each turn of the model.
        timeout: seconds that a reset or a step may take.

    Raises:
        ValueError: the extra is not installed, no server answers, or a tool cannot be offered to a model.
    """
    require_extra("openenv", "An OpenEnv environment")
    return _class_of(base_url.rstrip("/"), text_field, turn_rewards, timeout)()


# TRL tells environments apart by their class, so the same arguments must give the same one.
@functools.cache
def _class_of(base_url: str, text_field: str | None, turn_rewards: bool, timeout: float) -> type[_OpenEnv]:
    own = {"_text_field": text_field, "_turn_rewards": turn_rewards, "_server": (base_url, timeout)}
    with closing(_client(base_url, timeout)) as client:
        try:
            client.connect()
        except Exception as error:
            raise ValueError(
                f"No OpenEnv server answers at {base_url}: {printable(str(error))}. Start it, for example by `uv run "
                "server` in the folder of the environment."
            ) from error
        try:
            listed = client.step({"type": "list_tools"}).observation.get("tools")
        except RuntimeError as error:
            # Environments without MCP refuse it.
            if _REFUSED[0] not in str(error):
                raise
            listed = None
    if listed is None:
        action = _asked("GET", f"{base_url}/schema")["action"]
        fields = {key: value for key, value in action.get("properties", {}).items() if key != "metadata"}
        schema = {**action, "properties": fields}
        listed = [{"name": "act", "description": action.get("description") or "Act.", "input_schema": schema}]
        own["_typed"] = True
    methods = {each["name"]: tool_method(each["name"], each["description"], each["input_schema"]) for each in listed}
    return type("OpenEnv", (_OpenEnv,), {**own, **methods})


class _OpenEnv:
    """A session with a server; subclasses have its tools."""

    _server: tuple[str, float]
    _text_field: str | None
    _turn_rewards: bool
    _typed = False

    def __init__(self) -> None:
        self._client = _client(*self._server)
        # The server counts a session until it is closed.
        weakref.finalize(self, self._client.close).atexit = False
        self._is_done = True
        self._is_lost = False
        self._rewards: list[float] = []
        # The trainer sets it, where rewards of turns are used.
        self.turn_index = 0

    def reset(self, reset: str | Mapping[str, Any] | None = None, **row: Any) -> str | None:
        """Begin an episode with the arguments in the column ``reset``.

        Returns:
            What the model is told, or None.

        Raises:
            RuntimeError: the server does not begin one.
            ValueError: what it says has no field `text_field`.
        """
        given = json.loads(reset) if isinstance(reset, str) else reset or {}
        try:
            begun = self._client.reset(**{key: value for key, value in given.items() if value is not None})
        except Exception as error:
            raise RuntimeError(
                f"The OpenEnv server at {self._server[0]} did not begin an episode: {printable(str(error))}. Is it "
                "up, and does it allow as many sessions at a time as a batch has rollouts (max_concurrent_envs)?"
            ) from error
        self._is_done = begun.done
        self._is_lost = False
        self._rewards = []
        if self._text_field and _field(begun.observation, self._text_field) is None:
            raise ValueError(
                f"text_field: there is no '{self._text_field}' in what reset returns: {begun.observation}."
            )
        return self._text(begun.observation)

    def get_reward(self) -> float | list[float] | None:
        """The sum of the rewards of the steps, or the list of those of the turns; None if the server failed."""
        if self._is_lost:
            return None
        return list(self._rewards) if self._turn_rewards else sum(self._rewards)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """A step, and what the model is told of it. An exception is told, too, by TRL."""
        if self._is_lost:
            raise RuntimeError("The environment has failed.")
        if self._is_done:
            return "The episode has ended."
        action = arguments if self._typed else {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            result = self._client.step(action)
        except Exception as error:
            self._is_lost = not any(code in str(error) for code in _REFUSED)
            if self._is_lost:
                message = "The OpenEnv server at %s failed in an episode: %s"
                _log.warning(message, self._server[0], printable(str(error)))
            raise
        self._is_done = result.done
        self._rewards += [0.0] * (self.turn_index + 1 - len(self._rewards))
        self._rewards[self.turn_index] += float(result.reward or 0.0)
        return (self._text(result.observation) or "") if self._typed else _tool_answer(result.observation)

    def _text(self, observation: Mapping[str, Any]) -> str | None:
        said = _field(observation, self._text_field) if self._text_field else None
        if said is None:
            left = {key: each for key, each in observation.items() if key != "metadata" and each is not None}
            said = next(iter(left.values())) if len(left) == 1 else left or None
        return said if said is None or isinstance(said, str) else json.dumps(said)


def _tool_answer(observation: Mapping[str, Any]) -> str:
    """The text that an MCP tool returned.

    Raises:
        RuntimeError: the tool failed.
    """
    result = observation.get("result")
    content = result.get("content") if isinstance(result, dict) else None
    texts = [part.get("text") or json.dumps(part) for part in content or []]
    failure = (observation.get("error") or {}).get("message")
    if failure or (isinstance(result, dict) and result.get("is_error")):
        raise RuntimeError(failure or "\n".join(texts))
    if content is not None:
        return "\n".join(texts)
    return result if isinstance(result, str) else json.dumps(result)


def _field(observation: Mapping[str, Any], path: str) -> Any:
    found: Any = observation
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _client(base_url: str, timeout: float) -> Any:
    from openenv import GenericEnvClient

    return GenericEnvClient(base_url, message_timeout_s=timeout).sync()


def _asked(method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
    with BoundedSession() as session:
        answer = session.request(method, url, json=body, timeout=_PATIENCE)
    answer.raise_for_status()
    return answer.json()
