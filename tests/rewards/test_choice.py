"""ChoiceReward: which letter counts, and that reading it is linear in the text."""

import pytest

from basis_rl.rewards import ChoiceReward
from tests.rewards.growth import grows_linearly

reward = ChoiceReward()


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"so \boxed{B}", "B"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\boxed{\textbf{(B) } 42}", "B"),
        (r"\boxed{\textbf{(B)}\ 42}", "B"),
        (r"\boxed{B. Paris}", "B"),
        (r"\boxed{B: \text{Paris}}", "B"),
        (r"\boxed{(B) A dog}", "B"),
        (r"\boxed{(B) C_2H_4}", "B"),
        (r"\boxed{\mathrm{B}.}", "B"),
        (r"\boxed{$B$}", "B"),
        (r"\boxed{A} no, \boxed{C}", "C"),
        (r"The answer is A. \boxed{C}", "C"),
        ("Answer: B", "B"),
        ("Answer: (B)", "B"),
        ("**Answer:** (B) Paris", "B"),
        ("**Answer: B**", "B"),
        ("The answer is B.", "B"),
        ("the correct answer is option B, because C is wrong", "B"),
        ("Therefore the correct option is (b).", "B"),
        ("The final answer is: $\\textbf{(D)}$", "D"),
        ("The answer is A. Wait, no. The answer is C", "C"),
        ("The answer is A because of this", "A"),
        ("The answer is **J**.", "J"),
        ("Answer:\n\nE", "E"),
        ("Answer: **Option B**", "B"),
        ("The best choice is: (D), not option B", "D"),
        ("**Final Answer**: C", "C"),
    ],
)
def test_the_letter(text, letter):
    assert reward.choice(text) == letter


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B",
        "I would say B",
        r"\boxed{42}",
        r"Answer: B, so \boxed{42}",
        r"\boxed{A, B}",
        r"\boxed{A or B}",
        r"\boxed{(A) or (B)}",
        r"\boxed{\text{A}, \text{B}}",
        r"\boxed{(A)(B)}",
        r"\boxed{AB}",
        r"\boxed{B A}",
        r"\boxed{A\text{ and }C}",
        r"\boxed{A. or B.}",
        r"\boxed{}",
        r"\boxed{Both}",
        "Answer: A or B",
        "Answer: (A) and (B)",
        "Answer: A/B",
        "Answer: A, B",
        "The answer is A number that we seek",
        "The answer is a good one",
        "Answer: I think that",
        "The answer is Both",
        "The answer is not B",
        "Option A is wrong, and option C is incorrect",
        "We take choice B first",
        "The answer A is wrong",
        "The answer is B12",
        "Answer: K",
        "Answer: A. Or rather, the answer is B or C",
    ],
)
def test_no_letter_or_several_are_none(text):
    assert reward.choice(text) is None
    assert reward(prompts=[], completions=[text], solution=["B"]) == [0.0]


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
    assert reward([], [talk, talk, [], "none"], solution=["C", "D", "C", "C"], log_metric=logged.__setitem__) == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert logged == {"reward/choice/no_answer": 0.5}


@pytest.mark.parametrize(
    "piece",
    [
        "answer ",
        "Answer: A or ",
        "answer is ",
        "answer the option ",
        r"\boxed{",
        r"\boxed{A, ",
        "(",
        " ",
        "**",
        r"\text{",
    ],
)
def test_time_is_linear(piece):
    assert grows_linearly(lambda n: reward.choice("answer" + piece * n))
    assert grows_linearly(lambda n: reward.choice(rf"\boxed{{{piece * n}}}"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"letters": "abc"}, "different capital letters"),
        ({"letters": "AAB"}, "different capital letters"),
        ({"gold_index": 2}, "gold_index must be 0 or 1"),
    ],
)
def test_parameters_out_of_range(parameters, message):
    with pytest.raises(ValueError, match=message):
        ChoiceReward(**parameters)
