"""The benchmarks of the grading at a small size: free points, rollouts, fuzzed answers."""

from fractions import Fraction

import pytest

from basis_rl.rewards import MathVerifyReward
from benchmarks.reward.cases import FEW
from benchmarks.reward.fuzz import contradicted, inputs, probe_all
from benchmarks.reward.hacking import FEW_AND_HARD, Gold, Template, accepted_by, is_one_of, pairs, run, templates


class Lax:
    """Everything is right."""

    version = "lax"

    def __init__(self):
        self.asked = 0

    def __call__(self, prompts, completions, solution):
        self.asked += len(completions)
        return [1.0] * len(completions)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_free_points_at_a_small_size(every):
    size = len({template.text for template in templates()}) if every else 100
    reward = MathVerifyReward(num_workers=2, timeout=3.0)
    found = run(reward, list(pairs(FEW_AND_HARD, size, seed=2, every=every)))
    reward.close()
    assert found["pairs"] == size
    assert found["free_points"] == []
    assert len(found["accepted"]) > 5 if every else found["accepted"]


def test_whatever_a_person_would_reject_is_a_free_point():
    chosen = list(pairs(FEW, 10**6, seed=1))
    free = run(Lax(), chosen)["free_points"]
    told = {entry["template"] for entry in free}
    assert told >= {"V or N", r"\text{I give up, } V", "x = V = N", "0=0", "A B", "not x = V", "N $V$"}
    assert len(free) + sum(accepted_by(template, gold) is not None for template, gold, _ in chosen) == len(chosen)


def test_templates_know_for_which_golds_they_are_right():
    zero, five = Gold("0", 0, 1234), Gold("5", 5, 1234)
    times = next(template for template in templates() if template.text == r"V \cdot N")
    assert accepted_by(times, zero) == "right"
    assert accepted_by(times, five) is None
    assert accepted_by(Template("0.0", is_one_of("0.0")), zero) == "right"
    assert next(t for t in templates() if t.text == r"V\%").row == "percent_as_number"
    pair = Template("A B", numerals_only=True)
    first, second = map(int, pair.fill(five).removeprefix(r"So the answer is \boxed{").removesuffix("}.").split())
    assert first + second == 5
    assert pair.fill(Gold(r"\frac{1}{2}", None, 1234)) is None
    assert pair.fill(Gold("7e37", Fraction(7 * 10**37), 1234)) is None


@pytest.mark.long
def test_what_is_decided_without_math_verify_is_decided_like_it_on_fuzzed_answers():
    pairs = inputs(FEW, 1000, seed=3)
    assert pairs == inputs(FEW, 1000, seed=3)
    found = probe_all(pairs, timeout=2.0, workers=2)
    assert contradicted(found) == []
    assert all(entry["seconds"] < 60 for entry in found)
