"""Quirks and differences: every row of the tables, allowed and refused, and the docs that show them."""

import json
import re
from pathlib import Path

import pytest
from math_verify import parse, verify

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.grading import grade
from basis_rl.rewards.math.notation import normal_form
from basis_rl.rewards.math.rules import DEFAULT_QUIRKS, QUIRKS, RULES, refused

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


@pytest.mark.parametrize(
    ("name", "gold", "answer"), [*((name, *pair) for name, _, *pair in rows("quirks")), *rows("more")]
)
def test_each_quirk_is_accepted_today_and_refused_by_its_name_alone(name, gold, answer):
    assert grade(gold, answer) == "right"
    assert grade(gold, answer, [name]) == f"quirk: {name}"
    assert grade(gold, answer, [other for other in QUIRKS if other != name]) == "right"


@pytest.mark.parametrize(
    ("names", "gold", "answer"), [(*row[:2], answer) for row in rows("wide") for answer in row[2:]]
)
def test_the_rows_are_as_wide_as_described(names, gold, answer, reward):
    form = normal_form(answer)
    assert reward.equivalent([(gold, answer)]) == [True]
    assert [quirk for quirk in QUIRKS if grade(gold, form, [quirk]) != "right"] == names.split()
    assert answer == "banana ~= 5" or f"`{answer}`" in DOCS.read_text()


@pytest.mark.parametrize(("gold", "answer"), rows("strict"))
def test_what_is_right_by_any_reading_needs_no_quirk(gold, answer):
    assert grade(gold, answer) == "right"
    assert grade(gold, answer, list(QUIRKS)) == "right"


def test_the_golds_own_text_rests_on_no_quirk():
    for *_, answer in rows("quirks"):
        assert grade(answer, f"  {answer} ", list(QUIRKS)) == "right"


def test_the_reward_refuses_what_is_not_allowed_and_says_so_in_its_version(reward):
    golds = ["50", "x", "0.5", "2", "x^2-1", r"6\text{ cm}", "110_2"]
    answers = [boxed(answer) for answer in (r"50\%", "X", r"50\%", "x=2", "(x-1)(x+1)", r"6\text{ mm}", "110_3")]
    others = ("other_units", "other_base")
    assert set(DEFAULT_QUIRKS) | set(others) == set(QUIRKS)
    some = set(DEFAULT_QUIRKS) - {"percent_as_number", "case"} | {"other_base"}
    for allow, without, expected in (
        (None, others, [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
        (DEFAULT_QUIRKS, others, [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
        (QUIRKS, (), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (some, ("percent_as_number", "other_units", "case"), [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]),
        ([], tuple(QUIRKS), [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
    ):
        chosen = MathVerifyReward(num_workers=1, allow=allow)
        assert chosen.refused == refused(allow) == without
        assert f"rules {RULES}" in chosen.version
        assert chosen.version.endswith(f", without {', '.join(without)}" if without else f"rules {RULES}")
        assert (chosen.version == reward.version) == (without == others)
        assert chosen([], answers, golds) == expected
    assert MathVerifyReward(allow="case").refused == tuple(name for name in QUIRKS if name != "case")


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no quirk 'percent_as_fractions'\. Did you mean 'percent_as_fraction'"):
        MathVerifyReward(allow=["case", "percent_as_fractions"])
    with pytest.raises(ValueError, match=r"no quirk 'zzz'\. Known: percent_as_fraction, "):
        refused({"zzz"})


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


def test_the_docs_show_every_quirk_and_differences_of_every_kind():
    text = DOCS.read_text()
    assert [name for name, *_ in rows("quirks")] == list(QUIRKS)
    for name, what, gold, answer in rows("quirks"):
        assert f"| `{name}` | {what} | `{gold}` | `{answer}` |" in text
    listed = [(gold, answer, True) for gold, answer in pairs("right_here")]
    listed += [*((gold, answer, False) for gold, answer in pairs("wrong_here")), *rows("boxes")]
    known = {
        f"| `{gold}` | `{answer}` | {'right | wrong' if here else 'wrong | right'}" for gold, answer, here in listed
    }
    table = re.findall(r"^(\| `.*` \| `.*` \| (?:right \| wrong|wrong \| right)) \|", text, re.MULTILINE)
    assert 20 < len(table) <= 40
    assert set(table) <= known
