"""What is accepted, and where verdicts are not Math-Verify's: every row of the tables, and the docs that show them."""

import json
import re
from pathlib import Path

import pytest
from math_verify import parse, verify

DOCS = Path(__file__).resolve().parents[3] / "docs" / "rewards.md"
TABLES = json.loads(Path(__file__).with_name("answers.json").read_text())


def boxed(text):
    return rf"\boxed{{{text}}}"


def rows(name):
    """Of answers.json, which says what each table is."""
    return TABLES[name]["rows"]


def pairs(name):
    """Each gold with each of its answers."""
    return [(gold, answer) for gold, *answers in rows(name) for answer in answers]


KINDS = json.loads(Path(__file__).with_name("kinds.json").read_text())
BY_KIND = {
    word: {kind: [(gold, answer) for gold, *answers in table for answer in answers] for kind, table in kinds.items()}
    for word, kinds in KINDS.items()
}
RIGHT = {
    **{name: pairs(name) for name in ("right", "wide")},
    "quirks": [(gold, answer) for _, _, gold, answer in rows("quirks")],
    "golds": [(gold, right) for gold, right, _ in rows("golds")],
    **BY_KIND["right"],
}
WRONG = {
    "wrong": [*pairs("wrong"), ("1.41", r"\sqrt{2} \approx 1.41")],
    "lost": pairs("lost"),
    "golds": [(gold, wrong) for gold, _, wrong in rows("golds")],
    **BY_KIND["wrong"],
}


@pytest.mark.parametrize(
    ("given", "score"),
    [
        *(pytest.param(given, 1.0, id=f"{name} is right") for name, given in RIGHT.items()),
        *(pytest.param(given, 0.0, id=f"{name} is wrong") for name, given in WRONG.items()),
    ],
)
def test_each_table_and_kind_of_answers(given, score, reward):
    texts = [answer if r"\boxed" in answer else boxed(answer) for _, answer in given]
    found = reward([], texts, [gold for gold, _ in given])
    assert [pair for pair, each in zip(given, found, strict=True) if each != score] == []


def test_the_docs_have_every_acceptance_and_what_is_lost():
    text = DOCS.read_text()
    told = [f"| `{name}` | {what} | `{gold}` | `{answer}` |" for name, what, gold, answer in rows("quirks")]
    told += [f"`{answer}`" for _, answer in pairs("wide") if answer != "banana ~= 5"]
    told += [f"| `{gold}` | `{answer}` |" for gold, answer in rows("lost")]
    assert [each for each in told if each not in text] == []


ROLLOUTS = [
    *((gold, boxed(answer), True) for gold, answer in pairs("right_here")),
    *((gold, boxed(answer), False) for gold, answer in pairs("wrong_here")),
    *rows("boxes"),
]


@pytest.mark.parametrize(("gold", "rollout", "here"), ROLLOUTS)
def test_the_differences_are_as_listed(gold, rollout, here, reward):
    assert reward([], [rollout], [gold]) == [float(here)]
    sides = [parse(text, parsing_timeout=None) for text in (boxed(gold), rollout)]
    assert verify(*sides, timeout_seconds=None) is not here


def test_the_docs_show_differences_of_every_kind():
    text = DOCS.read_text()
    listed = [(gold, answer, True) for gold, answer in pairs("right_here")]
    listed += [*((gold, answer, False) for gold, answer in pairs("wrong_here")), *rows("boxes")]
    known = {
        f"| `{gold}` | `{answer}` | {'right | wrong' if here else 'wrong | right'}" for gold, answer, here in listed
    }
    table = re.findall(r"^(\| `.*` \| `.*` \| (?:right \| wrong|wrong \| right)) \|", text, re.MULTILINE)
    assert 20 < len(table) <= 40
    assert set(table) <= known
