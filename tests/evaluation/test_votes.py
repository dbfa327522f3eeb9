"""Grouping of answers: by form, by equivalence, and the same for right and wrong ones."""

import pytest

from basis_rl.evaluation.scores import count_votes, vote_form
from basis_rl.rewards import MathVerifyReward


def never(pairs):
    return [False] * len(pairs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\dfrac{\pi}{2})"),
        ("27.0", "27"),
        ("1,000", "1000"),
        (r"\text{east}", "east"),
        ("$x+1$.", "x + 1"),
    ],
)
def test_forms_of_one_answer(one, other):
    assert vote_form(one) == vote_form(other)


def test_equal_answers_have_equal_numbers_and_none_has_none():
    votes = count_votes([["7", "7.0", None, "8", " "], ["a", "b", "a", "c", "b"]], never)
    assert votes.tolist() == [[0, 0, -1, 1, -1], [0, 1, 0, 2, 1]]
    row = [r"2\frac{1}{3}", "7", "7/3", "12", "1 2"]
    same = {frozenset((row[0], "7/3"))}
    (numbers,) = count_votes([row], lambda pairs: [frozenset(pair) in same for pair in pairs]).tolist()
    assert numbers[0] == numbers[2] != numbers[1]
    assert numbers[3] != numbers[4]


def test_equivalence_joins_groups_and_chains():
    asked = []

    def equivalent(pairs):
        asked.extend(pairs)
        return [{a, b} in ({"x+1", "1+x"}, {"1+x", "x - -1"}) for a, b in pairs]

    votes = count_votes([["x+1", "x+1", "x+1", "1+x", "1+x", "x - -1", "3", "4"]], equivalent)
    assert votes.tolist() == [[0, 0, 0, 0, 0, 0, 1, 2]]
    assert all({a, b} != {"3", "4"} for a, b in asked), "numerals need not be asked about"
    assert "x - -1" in {a for pair in asked for a in pair}, "answers are asked about as they were written"


def test_math_verify_finds_wrong_answers_equal_too():
    reward = MathVerifyReward(num_workers=1)
    votes = count_votes([[r"\sqrt{8}", r"2\sqrt{2}", r"\pi r", "x", r"r\pi"]], reward.equivalent)
    reward.close()
    assert votes.tolist() == [[0, 0, 1, 2, 1]]


def test_only_the_most_frequent_forms_are_compared():
    sizes = []

    def count(pairs):
        sizes.append(len(pairs))
        return never(pairs)

    count_votes([[f"x+{i}" for i in range(64)]], count)
    assert sizes == [16 * 15 // 2]
