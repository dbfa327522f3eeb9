"""Kinds of answers of kinds.json: what is right is written in many ways, and beside each stands what is not it."""

import json
from pathlib import Path

import pytest

KINDS = json.loads(Path(__file__).with_name("kinds.json").read_text())


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("kind", dict.fromkeys([*KINDS["right"], *KINDS["wrong"]]))
def test_each_kind(kind, right, reward):
    rows = KINDS["right" if right else "wrong"].get(kind, [])
    pairs = [(gold, answer) for gold, *answers in rows for answer in answers]
    found = reward([], [rf"\boxed{{{answer}}}" for _, answer in pairs], [gold for gold, _ in pairs])
    assert [pair for pair, score in zip(pairs, found, strict=True) if score != float(right)] == []
