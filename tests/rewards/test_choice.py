"""ChoiceReward: which letter counts, and where it is no answer."""

import json
from pathlib import Path

import pytest

from basis_rl.rewards import ChoiceReward

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

reward = ChoiceReward()


@pytest.mark.parametrize(("text", "letter"), CASES["letters"])
def test_the_letter(text, letter):
    assert reward.choice(text) == letter


@pytest.mark.parametrize("text", CASES["none"])
def test_no_letter_or_several_are_none(text):
    assert reward.choice(text) is None
    assert reward(prompts=[], completions=[text], solution=["B"]) == [0.0]


@pytest.mark.parametrize("after_think", [None, True])
def test_a_letter_alone_is_an_answer_with_a_thought_before_it_or_without(after_think):
    texts = ["<think>A or C? The answer is C.</think>B", "B", "A or B"]
    assert ChoiceReward(after_think=after_think)([], texts, solution=["B"] * 3) == [1.0, 1.0, 0.0]


QUESTION = "Which?\nA. red hot\nB. green\nC. blue"


@pytest.mark.parametrize("prompt", [QUESTION, [{"role": "user", "content": QUESTION}]])
def test_an_option_that_is_all_of_a_rollout_is_an_answer_in_the_words_of_the_problem(prompt):
    texts = ["B) green", "**b. Green**", "B) red hot", "(B) is wrong", "B) gree", "A. red hot B. green", "B. green C"]
    scores = reward([prompt] * len(texts), texts, solution=["B"] * len(texts))
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_golds_in_any_form_and_rows_that_cannot_be_scored():
    golds = ["B", "(b)", r"We see \boxed{B}.", "B. Paris", " B ", "", "42", "K", "A or B", "None"]
    scores = reward(prompts=[], completions=["Answer: B"] * len(golds), solution=golds)
    assert scores == [1.0] * 5 + [None] * 5
    assert reward.check_golds(golds) == [5, 6, 7, 8, 9]


def test_golds_by_number():
    by_index = ChoiceReward(letters="ABCD", gold_index=0)
    assert [by_index.gold(cell) for cell in (0, "1", 3, 4, "-1", "C")] == ["A", "B", "D", None, None, "C"]
    assert ChoiceReward(gold_index=1).gold("1") == "A"


def test_case_and_letters():
    strict = ChoiceReward(letters="ABCD", ignore_case=False)
    texts = [r"\boxed{b}", "Answer: (b)", r"\boxed{B}", "Answer: E"]
    assert [strict.choice(text) for text in texts] == [None, None, "B", None]
    assert strict.version != reward.version


def test_conversations_and_metric():
    logged = {}
    talk = [{"role": "assistant", "content": "Answer: C"}]
    golds = ["C", "D", "C", "C"]
    assert reward([], [talk, talk, [], "none"], solution=golds, log_metric=logged.__setitem__) == [1.0, 0.0, 0.0, 0.0]
    assert logged == {"reward/choice/no_answer": 0.5}


SHOWN = [
    "A. one\nB. two",
    "Which? (A) one (B) two",
    "A) $x$  B) $y$",
    r"\textbf{(A)}\ 3 \qquad \textbf{(B)}\ 4",
    "a: yes, b: no",
    "- **A** one\n- **B** two",
    "A、一 B、二",
    "A | one\nB | two",
]
BARE = [
    "Which is it?",
    "Which? Answer with A, B, C or D.",
    "Which? Choose (A) or (B).",
    "Which? A|B|C|D?",
    "Is A right?",
    "A man says: B is tall.",
    "Which? Answer: (A), (B), (C) or (D). Think.",
]


@pytest.mark.parametrize("text", SHOWN)
def test_prompts_with_options_are_taken(text):
    reward.check_prompts([text, "Which is it?"])


@pytest.mark.parametrize("text", BARE)
def test_prompts_without_options_are_refused(text):
    with pytest.raises(ValueError, match=r"2 of 3 prompts show no options.*choices_column"):
        reward.check_prompts([text, text, SHOWN[0]])


def test_numbered_options_are_refused_with_another_reward_for_them():
    with pytest.raises(ValueError, match="take math_verify instead"):
        reward.check_prompts(["Which?\n1) one\n2) two"])
