"""Rows with one prompt that are two problems: in evaluations, with environments, and in what baselines believe."""

import math

import pytest

from basis_rl.baselines import BasisHistory, Spo
from tests.support import tooled
from tests.support.tiny import Keeps, sums, tiny_trainer

ASKED = [{"role": "user", "content": "Choose."}]
TWINS = [{"prompt": ASKED, "solution": str(i)} for i in range(4)]


def gold_reward(completions, solution, **kwargs):
    """0.0 for three golds and 1.0 for the last one: what is sampled does not matter."""
    return [float(gold == "3") for gold in solution]


class Play:
    """Ends well if its seed is above 0."""

    def reset(self, seed, **kwargs):
        self.seed = seed
        return f"Game {seed}."

    def get_reward(self):
        return float(self.seed > 0)


class PlayAny(Play):
    def reset(self, **row):
        return super().reset(row["seed"])


@pytest.mark.parametrize("environment", [Play, PlayAny])
def test_games_that_begin_with_one_prompt_are_told_apart_by_their_seeds(environment, tmp_path):
    games = [{"prompt": [{"role": "user", "content": "Play."}], "seed": seed} for seed in range(16)]
    own = {"reward_funcs": None, "processing_class": tooled.tokenizer(), "environment_factory": environment}
    settings = {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1}
    trainer = tiny_trainer(tmp_path, "rloo", Keeps, train_dataset=games, eval_dataset=games[:4], **own, **settings)
    trainer.train()
    assert trainer.evaluate()["eval_avg@2"] == 0.75
    ((batch, _),) = trainer.kept[:1]
    assert len(set(batch.prompt_ids)) == 4
    assert trainer.state.log_history[0]["sampler/coverage"] == 4 / 16


def test_remax_gives_each_row_its_own_greedy_reward(tmp_path):
    trainer = tiny_trainer(tmp_path, "remax", Keeps, reward_funcs=gold_reward, train_dataset=TWINS)
    trainer.train()
    ((batch, advantages),) = trainer.kept
    assert batch.greedy_rewards.tolist() == batch.rewards.tolist()
    assert sorted(batch.rewards.tolist()) == [0.0] * 12 + [1.0] * 4
    assert not bool(advantages.any()), "whatever is sampled earns what the greedy rollout earns"


@pytest.mark.parametrize("baseline", [BasisHistory(), Spo()])
def test_two_problems_with_one_text_have_two_beliefs(baseline, tmp_path):
    trainer = tiny_trainer(tmp_path, baseline, reward_funcs=gold_reward, train_dataset=TWINS, num_iterations=1)
    trainer.train()
    ids = trainer._ids(TWINS)
    values, _ = baseline.believed(ids)
    assert len(set(ids)) == 4
    assert float(values[3]) > 0.7
    assert float(values[:3].max()) < 0.4
    assert not math.isnan(float(values.sum()))


def test_columns_that_no_reward_names_do_not_count(tmp_path):
    rows = [{**row, "note": i} for i, row in enumerate(sums().to_list())]
    rows = [{key: value for key, value in row.items() if key != "prompt_id"} for row in rows]
    trainer = tiny_trainer(tmp_path, reward_funcs=gold_reward, train_dataset=rows)
    again = tiny_trainer(tmp_path, reward_funcs=gold_reward, train_dataset=[{**row, "note": 0} for row in rows])
    other = tiny_trainer(tmp_path, reward_funcs=gold_reward, train_dataset=[{**row, "solution": "1"} for row in rows])
    assert trainer.dataset_identity == again.dataset_identity != other.dataset_identity
