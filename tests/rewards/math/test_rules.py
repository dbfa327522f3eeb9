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


@pytest.mark.parametrize(("name", "what", "gold", "answer"), rows("quirks"))
def test_each_acceptance_is_in_the_docs(name, what, gold, answer, reward):
    assert reward.equivalent([(gold, answer)]) == [True]
    assert f"| `{name}` | {what} | `{gold}` | `{answer}` |" in DOCS.read_text()


@pytest.mark.parametrize(("gold", "answer"), pairs("wide"))
def test_they_are_as_wide_as_described(gold, answer, reward):
    assert reward.equivalent([(gold, answer)]) == [True]
    assert answer == "banana ~= 5" or f"`{answer}`" in DOCS.read_text()


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


@pytest.mark.parametrize(("gold", "answer"), rows("lost"))
def test_what_is_lost_is_as_listed(gold, answer, reward):
    assert reward([], [boxed(answer)], [gold]) == [0.0]
    assert f"| `{gold}` | `{answer}` |" in DOCS.read_text()


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
