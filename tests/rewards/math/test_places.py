r"""Where MathVerifyReward looks for an answer: without a box, and not in a thought."""

import json
import logging
from pathlib import Path

import pytest

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.places import find_answer
from basis_rl.rewards.math.reward import RULES

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())
BOX = r"\boxed{5}"


def grade(reward, text, gold, prompts=()):
    return reward(list(prompts), [text], solution=[gold])[0]


@pytest.fixture
def made(reward):
    """Rewards of other settings with the workers of the shared one."""

    def make(**settings):
        other = MathVerifyReward(num_workers=1, **settings)
        other._pool = reward._pool
        return other

    return make


@pytest.mark.parametrize(("where", "text", "gold"), CASES["right"])
def test_an_answer_that_is_in_no_box(made, where, text, gold):
    assert grade(made(answer_in=where), text, gold) == 1.0
    assert grade(made(answer_in=where), text, "77") == 0.0
    assert grade(made(), text, gold) == 0.0


@pytest.mark.parametrize(("where", "text", "answer"), CASES["found"])
def test_what_is_taken(where, text, answer):
    assert find_answer(text, where) == answer


def test_a_box_that_is_never_closed_marks_no_answer(made):
    assert grade(made(answer_in="anywhere"), r"\boxed{5} is wrong, so \boxed{6", "5") == 0.0
    assert grade(made(answer_in="anywhere"), "The answer is 5, so <answer>6", "5") == 1.0


def test_an_answer_that_nobody_finds_is_wrong_and_counted(made):
    logged = {}
    scores = made(answer_in="anywhere")(
        [], ["no idea", "It is 4.", ""], solution=["4"] * 3, log_metric=logged.__setitem__
    )
    assert scores == [0.0, 1.0, 0.0]
    assert logged["reward/no_answer"] == pytest.approx(2 / 3)
    assert "reward/no_box" not in logged


@pytest.mark.parametrize(("text", "answer"), CASES["stated"])
def test_what_a_rollout_states_without_a_mark(text, answer):
    assert find_answer(text, "anywhere") == answer
    # What stood before does not matter.
    if text:
        assert find_answer("So $x = 17$.\n\n" + text, "anywhere") == answer


@pytest.mark.parametrize("piece", ["1 000 ", r"\[ x ", r"\( x ", "1. ", "We see $x^2$ and 7.\n\n"])
def test_a_rollout_of_a_megabyte_is_searched_from_its_end(made, piece):
    """The whole of it takes Math-Verify minutes. The pairs of dollar signs at the end stay pairs."""
    text = piece * (1_000_000 // len(piece))
    assert grade(made(answer_in="anywhere"), f"$ {text}\nSo it is $x+33$.", "33+x") == 1.0


def test_a_thought_that_the_prompt_opens_has_to_be_closed(made):
    reward = made(after_think=True)
    assert grade(reward, f"hm {BOX}", "5", ["2 + 3 =<think>\n"]) == 0.0
    assert grade(reward, f"hm</think>{BOX}", "5", ["2 + 3 =<think>\n"]) == 1.0
    assert grade(reward, BOX, "5", ["2 + 3 ="]) == 1.0
    reward.tell_prompt("user: 2 + 3 =\nassistant: <think>\n")
    talk = [{"role": "assistant", "content": f"hm {BOX}"}]
    taken = [{"role": "assistant", "content": BOX, "reasoning_content": "hm"}]
    assert [grade(reward, talk, "5"), grade(reward, taken, "5")] == [0.0, 1.0]


@pytest.mark.parametrize("told", ["template", "prompt", "neither"])
def test_the_default_is_after_the_thought_where_the_template_thinks(made, told):
    reward = made()
    template = "{% if '</think>' in content %}...{% endif %}" if told == "template" else "{{ content }}"
    reward.tell_template(template, asks_for_box=True)
    reward.tell_prompt("Reason between <think> and </think>. 2 + 3 =" if told == "prompt" else "2 + 3 =")
    thinks = told != "neither"
    assert reward.thinks is thinks
    assert grade(reward, f"<think>{BOX}", "5") == (0.0 if thinks else 1.0)
    assert reward.version.endswith("after the thought") is thinks


def test_a_recipe_s_answers_are_anywhere_where_no_prompt_asks_for_a_box(made, caplog):
    auto = made(answer_in="auto")
    auto.tell_template("", asks_for_box=True)
    assert (auto.place, auto.version) == ("box", made().version)
    auto.tell_template("", asks_for_box=False)
    assert (auto.place, auto.version) == ("anywhere", made(answer_in="anywhere").version)
    assert "no prompt asks for" in auto.reading
    assert grade(auto, "The answer is 42.", "42") == 1.0


def test_from_python_one_warning(made, caplog):
    default = made()
    given = made(answer_in="box")
    with caplog.at_level(logging.WARNING):
        for reward in (default, given):
            reward.tell_template("", asks_for_box=False)
            reward.tell_template("", asks_for_box=False)
    assert len([record for record in caplog.records if "asks for a" in record.message]) == 1
    assert default.place == "box"


def test_settings_are_part_of_the_version(made):
    assert f"rules {RULES}" in made().version
    settings = [
        {}, {"rules": "plain"}, {"rules": "plain", "after_think": True}, {"after_think": True},
        *({"answer_in": where} for where in ("tag", "hashes", "last_line", "last_number", "anywhere")),
    ]  # fmt: skip
    assert len({made(**given).version for given in settings}) == len(settings)
    assert made(answer_in="box").version == made().version


@pytest.mark.parametrize("word", ["ſixth", "fİfth", "ſeventh"])
def test_letters_that_only_look_like_those_of_a_number_are_none(made, word):
    """Without regard to case a long s is an s, and a capital I with a dot an i."""
    assert grade(made(answer_in="anywhere"), f"So it is one {word}.", r"\frac{1}{6}") == 0.0
    assert grade(made(), rf"\boxed{{one {word}}}", r"\frac{1}{6}") == 0.0
