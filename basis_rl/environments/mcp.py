"""Tools of the Model Context Protocol (MCP) as methods of an environment, in the form that TRL's loop can call."""

from __future__ import annotations

import functools
import inspect
import json
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal

from transformers.utils.chat_template_utils import parse_google_format_docstring

from basis_rl.environments import NO_TOOLS

_PLAIN = {"string": str, "integer": int, "number": float, "boolean": bool, "null": type(None)}


def tool_method(name: str, description: str, schema: Mapping[str, Any]) -> Callable[..., Any]:
    """A method that calls ``self._call(name, arguments)``, with the arguments that the model gives.

    Its signature, type hints and docstring say what the tool's schema says, since TRL and chat templates read those.

    Args:
        name: of the tool.
        description: of the tool; may be a docstring with a section ``Args:``.
        schema: JSON schema of its arguments.

    Raises:
        ValueError: the tool or an argument of it has a name that a method cannot have.
    """
    if name in NO_TOOLS or name.startswith("_"):
        raise ValueError(f"The environment has a tool '{name}', a name that TRL does not offer to models. Rename it.")

    def method(self: Any, /, **arguments: Any) -> Any:
        return self._call(name, arguments)

    head, told, _ = parse_google_format_docstring(inspect.cleandoc(description or ""))
    properties = schema.get("properties") or {}
    # Parameters without a default come first.
    required = [key for key in properties if key in schema.get("required", ())]
    ordered = [*required, *(key for key in properties if key not in required)]
    hints = {key: _hint(properties[key], schema) for key in ordered}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for key in ordered:
        default = inspect.Parameter.empty if key in required else properties[key].get("default")
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        try:
            parameters.append(inspect.Parameter(key, kind, default=default, annotation=hints[key]))
        except ValueError as error:
            message = f"The environment's tool '{name}' has an argument '{key}', which is no name of a Python parameter"
            raise ValueError(f"{message}, so TRL cannot offer it to models. Rename it.") from error
    lines = [f"    {key}: {_description(key, properties[key], schema, told or {})}" for key in ordered]
    section = "\n\nArgs:\n" + "\n".join(lines) if lines else ""
    method.__name__ = method.__qualname__ = name
    method.__doc__ = (head or name) + section
    method.__annotations__ = hints
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


def _description(key: str, schema: Mapping[str, Any], whole: Mapping[str, Any], told: Mapping[str, str]) -> str:
    """One line about an argument; its schema, too, if it is a record, since a type hint does not name fields."""
    said = schema.get("description") or told.get(key) or schema.get("title") or key
    record = _resolved(schema, whole)
    fields = f" JSON schema: {json.dumps(record['properties'])}" if record.get("properties") else ""
    return " ".join(f"{said}{fields}".split())


def _resolved(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definition within the whole schema that a part refers to, or the part itself."""
    if "$ref" not in schema:
        return schema
    found: Any = whole
    for step in schema["$ref"].removeprefix("#/").split("/"):
        found = found[step]
    return found


def _hint(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
    """The type hint from which transformers makes a JSON schema again."""
    schema = _resolved(schema, whole)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values and all(isinstance(value, str | int | bool | None) for value in values):
        return Literal[tuple(values)]
    options = schema.get("anyOf") or schema.get("oneOf")
    kind = schema.get("type")
    if isinstance(kind, list):
        options = [{**schema, "type": each} for each in kind]
    if options:
        return functools.reduce(operator.or_, (_hint(option, whole) for option in options))
    if kind == "array":
        return list[_hint(schema["items"], whole)] if schema.get("items") else list  # type: ignore[misc]
    if kind == "object":
        values_of = schema.get("additionalProperties")
        return dict[str, _hint(values_of, whole)] if isinstance(values_of, dict) and values_of else dict  # type: ignore[misc]
    return _PLAIN.get(str(kind), Any)
