"""MathVerifyReward: verdicts, golds, hostile answers, dying workers."""

import json
import os
import time

from basis_rl.rewards import MathVerifyReward

HOSTILE = [
    r"9^{9^{9^{9}}}", "((9!)!)!", r"\binom{10000000}{5000000}", r"\sin(" * 30, r"\frac{1}{1+" * 40, "9" * 100_000,
    r"\frac{" * 20 + "2" + "}{2}" * 20, r"\sin(" * 12 + "1" + ")" * 12,
]  # fmt: skip


def grade(reward, answer, gold):
    return reward(prompts=[], completions=[answer], solution=[gold])[0]


def test_a_gold_that_cannot_be_parsed_is_not_scored(reward):
    assert grade(reward, r"\boxed{1}", "") is None
    assert reward.check_golds(["None", None, float("nan"), "7"]) == [0, 1, 2]
    told = "We add both of these numbers, so this is the answer: "
    assert reward.check_golds([rf"{told}\boxed{{{i}}}" for i in range(8)]) == []
    assert reward.check_golds([told] * 8) == list(range(8))
    assert len(reward.check_golds([told] * 7)) < 7
    assert reward.check_golds(["7", "", r"\frac{1}{2}"]) == [1]


def test_hostile_answers_are_wrong_and_do_not_hang_or_spoil_others(reward):
    answers = [rf"\boxed{{{text}}}" for text in HOSTILE]
    mixed = [answer for pair in zip(answers, [r"\boxed{5}"] * len(answers), strict=True) for answer in pair]
    metrics = {}
    rewards = reward(prompts=[], completions=mixed, solution=["5"] * len(mixed), log_metric=metrics.__setitem__)
    assert rewards[1::2] == [1.0] * len(answers)
    assert all(r in (0.0, None) for r in rewards[0::2])
    assert metrics["reward/timeout"] > 0
    assert metrics["reward/screened"] > 0


def test_verdicts_are_remembered(reward):
    grade(reward, r"\boxed{123 + 0}", "123")
    workers = [worker.process.pid for worker in reward._pool._workers]
    began = time.process_time()
    assert reward(prompts=[], completions=[r"\boxed{123 + 0}"] * 5000, solution=["123"] * 5000) == [1.0] * 5000
    assert time.process_time() - began < 1.0
    assert [worker.process.pid for worker in reward._pool._workers] == workers


def test_as_many_workers_as_there_are_cores_for_this_rank(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert MathVerifyReward()._pool.size == 6
    assert MathVerifyReward(num_workers=3)._pool.size == 3


def test_whole_solutions_are_golds(reward, shared_data):
    lines = (shared_data / "math500.jsonl").read_text().splitlines()[:64]
    assert reward.check_golds([json.loads(line)["solution"] for line in lines]) == []
