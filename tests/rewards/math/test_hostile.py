"""The benchmarks' rollouts and fuzzed answers. (Their 40 hostile ones: tests/benchmarks/test_whole_benchmarks.py.)"""

import pytest

from basis_rl.rewards.extract import last_boxed
from benchmarks.reward.cases import FEW as GOLDS
from benchmarks.reward.cases import cases
from benchmarks.reward.fuzz import contradicted, inputs, probe_all


def test_cases_are_the_same_for_a_seed_and_of_all_kinds():
    batch = cases(GOLDS, 400, seed=1)
    assert batch == cases(GOLDS, 400, seed=1) != cases(GOLDS, 400, seed=2)
    kinds = {case.kind.split(":")[0] for case in batch}
    assert kinds == {"right", "wrong", "malformed"}
    for case in batch:
        if case.kind in ("malformed: no box", "malformed: cut off", "malformed: unclosed box"):
            assert last_boxed(case.completion) is None
        if case.kind == "right: as it is":
            assert last_boxed(case.completion) == case.gold


@pytest.mark.long
def test_what_is_decided_without_math_verify_is_decided_like_it_on_fuzzed_answers():
    pairs = inputs(GOLDS, 1000, seed=3)
    assert pairs == inputs(GOLDS, 1000, seed=3)
    found = probe_all(pairs, timeout=2.0, workers=2)
    assert contradicted(found) == []
    assert all(entry["seconds"] < 60 for entry in found)
