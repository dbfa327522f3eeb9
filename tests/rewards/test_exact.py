"""ExactReward: where the answer is, and what counts as the same string."""

import json
from pathlib import Path

import pytest

from basis_rl.rewards import ExactReward
from basis_rl.rewards.extract import take_answer

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

TEXT = "<think>x #### 1\n<answer>2</answer></think>\nSo <answer> 3 </answer> is\n#### 4\n\\boxed{5} or\nsix \n\n"


@pytest.mark.parametrize(("where", "answer"), [("box", "5"), ("tag", "3"), ("hashes", "4"), ("last_line", "six")])
def test_where_the_answer_is(where, answer):
    assert take_answer(TEXT, where) == answer
    assert ExactReward(answer_in=where)([], [TEXT], solution=[answer]) == [1.0]
    assert take_answer("nothing" if where != "last_line" else " \n ", where) is None


def test_the_whole_answer_begins_after_the_thought():
    assert take_answer("<think>a</think> b\nc ", "whole") == "b\nc"
    assert take_answer("b", "whole") == "b"
    assert take_answer("<think>a</think>  ", "whole") is None


@pytest.mark.parametrize("text", ["<answer>1", "1</answer>", "</answer>1<answer>", "####", "####\n1"])
def test_unclosed_and_empty_places_hold_no_answer(text):
    assert take_answer(text, "hashes" if "#" in text else "tag") is None


@pytest.mark.parametrize(("given", "answer", "gold", "same"), CASES["same"])
def test_sameness(given, answer, gold, same):
    assert ExactReward(answer_in="tag", **given)([], [f"<answer>{answer}</answer>"], solution=[gold]) == [float(same)]


@pytest.mark.parametrize(("gold", "right", "wrong"), CASES["boxes"])
def test_in_a_box_an_answer_may_be_written_as_latex_asks_for_it(gold, right, wrong):
    reward = ExactReward()
    assert [reward([], [rf"\boxed{{{answer}}}"], solution=[gold]) for answer in right] == [[1.0]] * len(right)
    assert [reward([], [rf"\boxed{{{answer}}}"], solution=[gold]) for answer in wrong] == [[0.0]] * len(wrong)
    assert ExactReward("whole")([], [r"\text{Paris}", "Paris."], solution=["Paris"] * 2) == [0.0, 0.0]


def test_several_golds_and_none():
    reward = ExactReward(answer_in="whole", ignore_punctuation=True)
    golds = [["UK", "United Kingdom"], ["France"], "", None, "...", [None, ""]]
    logged = {}
    assert reward([], ["uk"] * 6, solution=golds, log_metric=logged.__setitem__) == [1.0, 0.0, None, None, None, None]
    assert reward.check_golds(golds) == [2, 3, 4, 5]
    assert logged == {"reward/exact/no_answer": 0.0}


def test_options_are_part_of_the_version():
    versions = {ExactReward(**given).version for given in ({}, {"ignore_case": False}, {"answer_in": "tag"})}
    assert len(versions) == 3
