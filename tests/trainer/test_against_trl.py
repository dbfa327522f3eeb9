"""With the baseline `grpo`, BasisTrainer is TRL's GRPOTrainer: same rollouts, losses and gradients, step for step."""

import pytest
import torch
from trl import GRPOConfig

from basis_rl.objectives import OBJECTIVES
from tests.support.tiny import TracedBasis, TracedTrl, config, parity_reward, sums

pytestmark = pytest.mark.gpu


def trl_config(ours, objective):
    loss = OBJECTIVES[objective]
    names = set(GRPOConfig.__dataclass_fields__) - {"generation_batch_size", "loss_type", "importance_sampling_level"}
    own = {"loss_type": loss.loss_type, "importance_sampling_level": loss.importance_sampling_level}
    return GRPOConfig(**{name: value for name, value in vars(ours).items() if name in names}, **own)


def trained(cls, args, *rewards, **given):
    # A path: with beta > 0 TRL loads the reference model from it.
    trainer = cls(given.pop("model"), [*rewards] or parity_reward, args, sums(), **given)
    trainer.train()
    return trainer


def assert_same_trace(theirs, ours, rel=0.0, atol=1e-6, of_gradient=None):
    assert len(theirs) == len(ours) > 0
    assert any(gradient.abs().max() > 1e-4 for _, gradient in theirs), "a trace of zeros would prove nothing"
    for (loss, gradient), (own_loss, own_gradient) in zip(theirs, ours, strict=True):
        assert own_loss == pytest.approx(loss, rel=rel, abs=atol)
        torch.testing.assert_close(own_gradient, gradient, rtol=rel, atol=of_gradient or atol)


CASES = [(objective, 0.04, "auto") for objective in ("grpo", "gspo", "dr_grpo", "dapo")]
CASES += [("grpo", 0.0, "auto"), ("dapo", 0.0, "none")]


@pytest.mark.parametrize(("objective", "beta", "packing"), CASES)
def test_loss_and_gradients_equal_trl(objective, beta, packing, tmp_path, tiny_path):
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "packing": packing}
    args = config(tmp_path, max_steps=4, beta=beta, **settings)
    theirs = trained(TracedTrl, trl_config(args, objective), model=str(tiny_path))
    ours = trained(TracedBasis, args, model=str(tiny_path), baseline="grpo", objective=objective)
    assert len(ours.trace) == 4
    assert_same_trace(theirs.trace, ours.trace)


def short_is_good(completion_ids, **kwargs):
    """Scores some rollouts only: the total of a row counts the functions that scored it."""
    return [None if ids[0] % 3 == 0 else 1.0 / len(set(ids)) for ids in completion_ids]


def test_weighted_and_missing_rewards_equal_trl(tmp_path, tiny_path):
    args = config(tmp_path, reward_weights=[0.7, 2.0])
    of_trl = trl_config(args, "dapo")
    of_trl.reward_weights = [0.7, 2.0]
    functions = (parity_reward, short_is_good)
    theirs = trained(TracedTrl, of_trl, *functions, model=str(tiny_path))
    ours = trained(TracedBasis, args, *functions, model=str(tiny_path), baseline="grpo")
    assert ours.state.log_history[0]["reward"] == theirs.state.log_history[0]["reward"]
    assert list(ours._logs["advantages"]) == pytest.approx(list(theirs._logs["advantages"]), abs=1e-5)
    assert_same_trace(theirs.trace, ours.trace, of_gradient=1e-5)


SCALES = [{"scale_rewards": "none"}, {"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}]


def length_reward(completion_ids, **kwargs):
    return [len(ids) / 6 for ids in completion_ids]


@pytest.mark.parametrize("settings", SCALES, ids=lambda each: next(iter(each.values())))
def test_trls_own_scales_train_the_same(settings, tmp_path, tiny_path):
    """A configuration of TRL's as it is, arguments by position; the baseline is the one that is equal."""
    args = config(tmp_path, loss_type="grpo")
    found = []
    for cls, given in ((TracedTrl, trl_config(args, "grpo")), (TracedBasis, args)):
        for key, value in settings.items():
            setattr(given, key, value)
        found.append(trained(cls, given, parity_reward, length_reward, model=str(tiny_path)))
    assert found[1].objective.loss_type == args.loss_type
    assert_same_trace(found[0].trace, found[1].trace, 1e-3, 1e-5)
