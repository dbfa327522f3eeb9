"""Methods made from the JSON schemas of MCP tools: a chat template is told of them what the schema says."""

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from basis_rl.environments.mcp import tool_method

# Every form of an argument that FastMCP and pydantic write, and what transformers writes for the same type.
FORMS = [
    ({"type": "integer"}, {"type": "integer"}),
    ({"type": "number"}, {"type": "number"}),
    ({"type": "boolean"}, {"type": "boolean"}),
    ({"type": "string", "title": "Which"}, {"type": "string"}),
    ({"enum": ["a", "b"], "type": "string"}, {"type": "string", "enum": ["a", "b"]}),
    ({"const": "a"}, {"type": "string", "enum": ["a"]}),
    ({"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "string"}}),
    ({"type": "array"}, {"type": "array"}),
    ({"type": "object", "additionalProperties": {"type": "number"}},) * 2,
    ({"type": "object", "additionalProperties": True}, {"type": "object"}),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "string", "nullable": True}),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"type": ["integer", "string"]}),
    ({"type": ["integer", "null"]}, {"type": "integer", "nullable": True}),
    ({"$ref": "#/$defs/Where"}, {"type": "string", "enum": ["here", "there"]}),
    ({}, {}),
]
WHERE = {"Where": {"enum": ["here", "there"], "type": "string"}}


class Holder:
    """An environment that keeps what it is called with."""

    def _call(self, name, arguments):
        return name, arguments


def bound(*tool):
    return getattr(type("Own", (Holder,), {tool[0]: tool_method(*tool)})(), tool[0])


@pytest.mark.parametrize(("form", "written"), FORMS)
def test_transformers_writes_the_schema_again(form, written):
    schema = {"properties": {"later": {**form, "default": None}, "first": form}, "required": ["first"], "$defs": WHERE}
    method = bound("look", "Looks.", schema)
    told = get_json_schema(method)["function"]
    assert told["name"] == "look"
    assert told["description"] == "Looks."
    assert told["parameters"]["required"] == ["first"]
    for argument in told["parameters"]["properties"].values():
        argument.pop("description")
        assert argument == written
    assert method(first=1) == ("look", {"first": 1}), "an argument that the model leaves out is not sent"


def test_descriptions_come_from_the_schema_or_from_the_docstring():
    text = "Looks.\n\n        Args:\n            a: from the docstring\n            b: not this"
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    properties = {"a": {"type": "integer"}, "b": {"type": "integer", "description": "from\nthe schema"}, "c": inner}
    told = get_json_schema(bound("look", text, {"properties": properties}))["function"]
    assert told["description"] == "Looks."
    said = {name: each["description"] for name, each in told["parameters"]["properties"].items()}
    assert said["a"] == "from the docstring"
    assert said["b"] == "from the schema"
    assert '"x"' in said["c"], "the fields of a record"


def test_a_tool_without_arguments_or_description():
    assert get_json_schema(bound("look", "", {}))["function"]["description"] == "look"


@pytest.mark.parametrize(("name", "argument"), [("reset", "a"), ("_hidden", "a"), ("look", "in"), ("look", "a-b")])
def test_names_that_cannot_be_offered_are_refused(name, argument):
    with pytest.raises(ValueError, match="Rename it"):
        tool_method(name, "Looks.", {"properties": {argument: {"type": "integer"}}})
