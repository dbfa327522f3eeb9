"""What the policy study makes of its runs: levels, and rollouts until a level, against plain computation."""

import numpy as np
import pytest

from basis_rl.engine import Sampling, prompt_tokens, sample
from studies.policy import report as policy_report
from studies.policy.study import accuracy
from studies.training import levels
from tests.support.tiny import sums, tiny_model, tiny_tokenizer


def curve(seed, points=12):
    rng = np.random.default_rng(seed)
    return (np.arange(points) * 64.0).tolist(), np.clip(0.5 + np.cumsum(rng.normal(0.01, 0.05, points)), 0, 1).tolist()


@pytest.mark.parametrize("last", [1, 3, 20])
def test_levels_are_trailing_means(last):
    _, accuracy = curve(0)
    for i, level in enumerate(levels(accuracy, last)):
        before = [accuracy[j] for j in range(len(accuracy)) if i - last < j <= i]
        assert level == pytest.approx(sum(before) / len(before))


@pytest.mark.parametrize("seed", range(8))
def test_spent_until_is_where_the_level_is_first_reached(seed):
    spent, accuracy = curve(seed)
    held = levels(accuracy)
    level = (max(held) + held[0]) / 2
    found = policy_report.spent_until(spent, accuracy, level)
    assert np.interp(found, spent, held) == pytest.approx(level)
    fine = np.linspace(0, found * (1 - 1e-9), 5000)[:-1]
    assert (np.interp(fine, spent, held) < level).all() or found == spent[0]
    assert policy_report.spent_until(spent, accuracy, max(held) + 1e-9) is None
    assert policy_report.spent_until(spent, accuracy, held[0]) == spent[0]


def policy_run(row, seed, accuracy):
    spent = [float(i) for i in range(len(accuracy))]
    return {"objective": "grpo", "row": row, "seed": seed, "learning_rate": 1e-4,
            "accuracy": accuracy, "rollouts": spent, "cpu": 1.0}  # fmt: skip


def test_summary_compares_runs_of_the_same_seed():
    rises = {0: [0.1] + [0.5] * 9, 1: [0.1] + [0.7] * 9}
    runs = [policy_run("grpo G=8", seed, accuracy) for seed, accuracy in rises.items()]
    table = {"rollouts": 18, "cpu": 9}
    runs += [{**policy_run("basis", seed, [0.1] + [0.6] * 9), "table": table} for seed in rises]
    groups, basis = policy_report.summary(runs)
    assert groups["final"] == {"median": pytest.approx(0.6), "min": pytest.approx(0.5), "max": pytest.approx(0.7)}
    # Its own trailing mean is at its end from the fifth measurement on.
    assert groups["to_reference"]["median"] == pytest.approx(4 / 9)
    # With seed 0 the trailing mean of four passes 0.5 between two (0.4333 after three) and three (0.475, then 0.6);
    # with seed 1 the reference ends at 0.7, which 0.6 never is.
    held = [0.1, 0.35, 1.3 / 3, 0.475, 0.6]
    share = (3 + (0.5 - held[3]) / (held[4] - held[3])) / 9
    assert basis["to_reference"]["median"] == pytest.approx(share)
    assert basis["to_reference_with_table"]["median"] == pytest.approx(share + 2)
    assert basis["never"] == 1
    assert "never 1" in policy_report.table([groups, basis])


def test_accuracy_is_the_mean_reward_of_greedy_rollouts_in_the_order_of_the_problems():
    tokenizer, data = tiny_tokenizer(), sums(8)
    prompts = [prompt_tokens(prompt, tokenizer, {}) for prompt in data["prompt"]]
    drawn = dict(sample(tiny_model(tokenizer), tokenizer, prompts, Sampling(4, temperature=0.0)))

    def reward(prompts, completions, solution):
        assert solution == data["solution"][:]
        assert completions == [drawn[i][0].text for i in range(8)]
        return [None, *[1.0] * 3, *[0.0] * 4]

    assert accuracy(tiny_model(tokenizer), tokenizer, data, reward, 4) == pytest.approx(3 / 8)
    assert len({rollout.text for (rollout,) in drawn.values()}) > 1
