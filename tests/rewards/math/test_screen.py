"""What is screened is hopeless, and no realistic gold comes near."""

import json
import random
from pathlib import Path

import pytest

from basis_rl.rewards.math.screen import LIMITS, measure, screened

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

HOPELESS = {
    "length": "x+" * 5_000 + "x",
    "depth": "(" * 40 + "2" + ")" * 40,
    "digits": "9" * 1_500,
    "size": "9^{9^{9}}",
    "control": "2\x00",
}
FILES = ["aime24.jsonl", "aime25.jsonl", "amc23.jsonl", "math500.jsonl"]
LONG_FILES = ["minerva_math.jsonl", "olympiadbench.jsonl", "gsm8k_test.jsonl", "gsm8k_train.jsonl", "math_train.json"]


@pytest.mark.parametrize("name", LIMITS)
def test_each_measure_screens_its_own_and_never_the_gold(name):
    assert screened("2", HOPELESS[name]) == name
    # A gold of that size can be right, rewritten too.
    assert screened(HOPELESS[name], HOPELESS[name]) is None
    assert screened(HOPELESS[name], HOPELESS[name] + " ") is None


@pytest.mark.parametrize(("text", "digits"), CASES["sizes"])
def test_sizes_of_numbers(text, digits):
    found = measure("size", text)
    assert found == pytest.approx(digits, rel=0.1, abs=0.6) or (digits >= 1e6 and found >= digits)


@pytest.mark.parametrize(
    ("text", "depth"),
    [("", 0), ("x", 0), ("(x)", 1), ("()()", 1), ("([{x}])", 3), (r"\{\{x", 0), ("))((x", 2), ("}((", 2)],
)
def test_depth_is_that_of_open_brackets(text, depth):
    assert measure("depth", text) == depth


@pytest.mark.parametrize(("name", "piece"), [("length", "x"), ("digits", "9"), ("depth", "(")])
def test_a_limit_and_twice_the_golds_measure_are_still_let_through(name, piece):
    limit, gold = LIMITS[name], piece * LIMITS[name]
    assert screened("2", piece * limit) is None
    assert screened("2", piece * (limit + 1)) == name
    if name != "digits":  # twice as many of them are too long
        assert screened(gold, piece * 2 * limit) is None
    assert screened(gold, piece * (2 * limit + 1)) is not None


@pytest.mark.parametrize("code", [code for code in range(0xA0) if code < 32 or code > 126])
def test_a_control_character_that_is_no_white_space_screens(code):
    answer = f"x+{chr(code)}1"
    assert screened("x+1", answer) == (None if chr(code).isspace() else "control")
    assert screened(answer, answer) is None


@pytest.mark.parametrize("file", [*FILES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_FILES)])
def test_no_gold_of_real_sets_comes_near_a_limit(file, shared_data):
    from basis_rl.data import DataArguments
    from basis_rl.evaluation.benchmarks import load_benchmark

    data = DataArguments(on_missing_gold="drop")
    golds = load_benchmark(str(shared_data / file), data, conversational=True).dataset["solution"]
    rng = random.Random(0)
    for gold in golds:
        other = golds[rng.randrange(len(golds))]
        assert screened(other, gold) is None  # as an answer to another problem
        assert screened("7", rf"\left( {gold} \right) = {gold} \text{{ apples}}") is None
        for name, limit in LIMITS.items():
            assert 4 * measure(name, gold) <= limit
