"""What the adapter of verifiers writes into a record, with stand-ins for verifiers' own classes."""

import sys
from copy import copy
from types import ModuleType, SimpleNamespace

import pytest

from basis_rl.environments.verifiers import _record

CLASSES = "AssistantMessage", "MessageNode", "ModelCall", "SystemMessage", "ToolCall", "ToolMessage", "UserMessage"


def stands_in(name):
    """Like verifiers' own, which are pydantic's, it copies lists."""

    def made(**given):
        return SimpleNamespace(kind=name, **{key: copy(value) for key, value in given.items()})

    return made


@pytest.fixture
def trace(monkeypatch):
    stand_in = ModuleType("verifiers.v1")
    for name in CLASSES:
        setattr(stand_in, name, stands_in(name))
    package = ModuleType("verifiers")
    package.v1 = stand_in
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", stand_in)
    return SimpleNamespace(nodes=["old"], calls=["old"], agent_completed=lambda: None, stop=lambda why: None)


PROMPT = [{"role": "system", "content": "Multiply."}, {"role": "user", "content": "2 * 3 ="}]
CALLS = [{"type": "function", "function": {"name": "times", "arguments": {"a": a}}} for a in (2, 3)]
TALK = [
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "name": "times", "content": "2"},
    {"role": "tool", "name": "times", "content": "3"},
    {"role": "assistant", "content": "6"},
]


@pytest.mark.parametrize(("completion", "sampled"), [("6", [2]), (TALK, [2, 5])])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_text_or_a_conversation_stands_behind_the_prompt(completion, sampled, is_cut, trace):
    _record(trace, PROMPT, completion, is_cut)
    nodes = trace.nodes
    assert [node.parent for node in nodes] == [None, *range(len(nodes) - 1)]
    assert [row for row, node in enumerate(nodes) if node.sampled] == sampled
    assert [node.message.kind for node in nodes[:2]] == ["SystemMessage", "UserMessage"]
    assert (nodes[-1].message.kind, nodes[-1].message.content) == ("AssistantMessage", "6")
    assert [(call.node, call.finish_reason) for call in trace.calls] == [
        (len(nodes) - 1, "length" if is_cut else "stop")
    ]
    asked = [call.id for node in nodes for call in getattr(node.message, "tool_calls", None) or []]
    answered = [node.message.tool_call_id for node in nodes if node.message.kind == "ToolMessage"]
    assert asked == answered
    assert len(asked) == (2 if completion is TALK else 0)
