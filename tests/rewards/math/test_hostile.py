"""The benchmarks' hostile answers and fuzzed ones: no hang, nothing else's verdict changed, the same again."""

import time

import pytest

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.extract import last_boxed
from benchmarks.reward.cases import FEW as GOLDS
from benchmarks.reward.cases import cases
from benchmarks.reward.fuzz import contradicted, inputs, probe_all
from benchmarks.reward.hostile import HOSTILE


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
def test_hostile_answers_change_nothing_for_the_others():
    batch = cases(GOLDS, 4 * len(HOSTILE), seed=0)
    texts, golds, clean = [], [], []
    for i, case in enumerate(batch):
        if i % 4 == 0:
            texts.append(rf"\boxed{{{HOSTILE[i // 4][1]}}}")
            golds.append(case.gold)
        clean.append(len(texts))
        texts.append(case.completion)
        golds.append(case.gold)
    alone = MathVerifyReward()
    expected = alone([], [case.completion for case in batch], [case.gold for case in batch])
    alone.close()
    runs = []
    for _ in range(2):
        reward = MathVerifyReward(timeout=5.0)
        began = time.perf_counter()
        runs.append(reward([], texts, golds))
        assert time.perf_counter() - began < len(HOSTILE) * 8
        reward.close()
    assert [[run[i] for i in clean] for run in runs] == [expected] * 2
    assert all(run[i] != 1.0 for run in runs for i in range(len(texts)) if i not in clean)


@pytest.mark.long
def test_what_is_decided_without_math_verify_is_decided_like_it_on_fuzzed_answers():
    pairs = inputs(GOLDS, 1000, seed=3)
    assert pairs == inputs(GOLDS, 1000, seed=3)
    found = probe_all(pairs, timeout=2.0, workers=2)
    assert contradicted(found) == []
    assert all(entry["seconds"] < 60 for entry in found)
