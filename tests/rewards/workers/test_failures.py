"""Failures of the infrastructure: when a run ends by them, and that they are no wrong answers."""

import random

import pytest

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.workers import failures
from basis_rl.rewards.workers.failures import FailureMonitor, RewardInfrastructureError
from basis_rl.rewards.workers.pool import Outcome


def raises(monitor, scored, failed):
    try:
        monitor.record(scored, failed)
    except RewardInfrastructureError:
        return True
    return False


def test_against_a_plain_loop(monkeypatch):
    choice = random.Random(0)
    for _ in range(50):
        limit, window, minimum = choice.choice([0.0, 0.05, 0.3]), choice.choice([50, 200]), choice.choice([1, 20, 50])
        monkeypatch.setattr(failures, "_WINDOW", window)
        monkeypatch.setattr(failures, "_MINIMUM", minimum)
        monitor, rollouts = FailureMonitor("x", limit), []
        for _ in range(60):
            size = choice.choice([1, 8, 32, 100])
            failed = sum(choice.random() < 0.06 for _ in range(size))
            rollouts.append((size, failed))
            while sum(n for n, _ in rollouts[1:]) >= window:
                rollouts.pop(0)
            n, bad = (sum(column) for column in zip(*rollouts, strict=True))
            assert raises(monitor, size - failed, failed) == (failed > 0 and bad > limit * max(n, minimum))


@pytest.fixture
def broken(monkeypatch):
    """A reward whose pool fails at every answer with a 9, and finds the others right."""
    reward = MathVerifyReward(num_workers=1)

    def run(tasks, **given):
        return [
            Outcome("starved", {}) if "9" in task["answer"] else Outcome("ok", {"verdict": "right"}) for task in tasks
        ]

    monkeypatch.setattr(reward._pool, "run", run)
    return reward


def test_a_failed_grading_is_no_wrong_answer(broken):
    metrics = {}
    answers = [rf"\boxed{{x_{i}}}" for i in range(20)]
    rewards = broken([], answers, ["y"] * 20, log_metric=metrics.__setitem__)
    assert rewards == [None if "9" in answer else 1.0 for answer in answers]
    assert metrics["reward/infrastructure"] == 2 / 20
    assert metrics["reward/timeout"] == 0


def test_too_many_end_the_run_with_one_error(broken):
    with pytest.raises(RewardInfrastructureError, match="Math-Verify could not score 8 of the last 8 rollouts"):
        broken([], [rf"\boxed{{x_9{i}}}" for i in range(8)], ["y"] * 8)


def test_whose_failure_counts(broken, monkeypatch):
    assert broken([], [r"\boxed{x_9}"] * 8, [["y", "x_9"]] * 8) == [1.0] * 8  # another of its golds scores it
    assert broken.check_golds(["x_1", "x_9", ""]) == []  # of a gold nothing is known
    monkeypatch.setattr(broken._pool, "run", lambda tasks, **given: [Outcome("timeout", {})] * len(tasks))
    assert broken.check_golds(["x_4", "7"]) == [0]  # asked for though it is its own text, and an answer is not
    assert broken([], [r"\boxed{x_4}"] * 2, ["x_4", "y"]) == [1.0, 0.0]
    raised = Outcome("ok", {"error": "out of memory"})
    monkeypatch.setattr(broken._pool, "run", lambda tasks, **given: [raised] * len(tasks))
    assert broken([], [r"\boxed{x_2}"], ["y"]) == [0.0]


def test_what_is_over_the_budget_of_its_batch_is_not_scored_counted_and_said_and_ends_no_run(
    broken, monkeypatch, caplog
):
    given = {}

    def run(tasks, **options):
        given.update(options)
        late = [Outcome("over_budget", {})] * (len(tasks) - 1)
        return [Outcome("ok", {"verdict": "right"}), *late]

    monkeypatch.setattr(broken._pool, "run", run)
    answers, metrics = [rf"\boxed{{x_{i}}}" for i in range(20)], {}
    assert broken([], answers, ["y"] * 20, metrics.__setitem__) == [1.0, *[None] * 19]
    assert given["seconds"] == broken.batch_timeout == 300.0
    assert metrics["reward/over_budget"] == 19 / 20
    assert metrics["reward/infrastructure"] == metrics["reward/timeout"] == 0
    assert "19 of 20 rollouts were not done in batch_timeout (300 s)" in caplog.text
    assert broken([], answers[:2], ["y"] * 2) == [1.0, 1.0]  # nothing of it was remembered
    broken.check_golds(["x_1"])
    assert given["seconds"] is None
    assert broken([], [r"\boxed{x_99}"] * 2, [["a", "x_99"], ["a", "b"]]) == [1.0, 1.0]
