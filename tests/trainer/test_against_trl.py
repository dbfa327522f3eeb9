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


@pytest.mark.parametrize("objective", ["grpo", "gspo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(("beta", "packing"), [(0.0, "auto"), (0.04, "auto"), (0.04, "none")])
def test_loss_and_gradients_equal_trl(objective, beta, packing, tmp_path, tiny_path):
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "packing": packing}
    ours_config = config(tmp_path, max_steps=4, beta=beta, **settings)
    traces = []
    for cls, args, extra in (
        (TracedTrl, trl_config(ours_config, objective), {}),
        (TracedBasis, ours_config, {"baseline": "grpo", "objective": objective}),
    ):
        trainer = cls(
            model=str(tiny_path),  # a path: with beta > 0 TRL loads the reference model from it
            reward_funcs=parity_reward,
            args=args,
            train_dataset=sums(),
            **extra,
        )
        trainer.train()
        traces.append(trainer.trace)
    theirs, ours = traces
    assert len(theirs) == len(ours) == 4
    assert any(abs(loss) > 1e-4 for loss, _ in theirs), "a trace of zeros would prove nothing"
    for (loss, gradient), (own_loss, own_gradient) in zip(theirs, ours, strict=True):
        assert own_loss == pytest.approx(loss, rel=0, abs=1e-6)
        assert gradient.abs().max() > 0
        torch.testing.assert_close(own_gradient, gradient, rtol=0, atol=1e-6)


def short_is_good(completion_ids, **kwargs):
    """Scores some rollouts only: the total of a row counts the functions that scored it."""
    return [None if ids[0] % 3 == 0 else 1.0 / len(set(ids)) for ids in completion_ids]


def test_weighted_and_missing_rewards_equal_trl(tmp_path, tiny_path):
    ours_config = config(tmp_path, reward_weights=[0.7, 2.0])
    theirs_config = trl_config(ours_config, "dapo")
    theirs_config.reward_weights = [0.7, 2.0]
    traces = []
    for cls, args, extra in ((TracedTrl, theirs_config, {}), (TracedBasis, ours_config, {"baseline": "grpo"})):
        trainer = cls(
            model=str(tiny_path), reward_funcs=[parity_reward, short_is_good], args=args, train_dataset=sums(), **extra
        )
        trainer.train()
        logged = trainer.state.log_history[0]
        traces.append((trainer.trace, logged["reward"], list(trainer._logs["advantages"])))
    (theirs, reward_a, advantages_a), (ours, reward_b, advantages_b) = traces
    assert reward_a == reward_b
    assert advantages_b == pytest.approx(advantages_a, abs=1e-5)
    assert any(a != 0 for a in advantages_a)
    for (loss_a, _), (loss_b, _) in zip(theirs, ours, strict=True):
        assert loss_b == pytest.approx(loss_a, rel=0, abs=1e-6)


SCALES = [{"scale_rewards": "none"}, {"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}]


def length_reward(completion_ids, **kwargs):
    return [len(ids) / 6 for ids in completion_ids]


@pytest.mark.parametrize("settings", SCALES, ids=lambda each: next(iter(each.values())))
def test_trls_own_scales_train_the_same(settings, tmp_path, tiny_path):
    """A configuration of TRL's as it is, arguments by position; the baseline is the one that is equal."""
    ours = config(tmp_path, loss_type="grpo")
    theirs = trl_config(ours, "grpo")
    found = []
    for kind, args in ((TracedTrl, theirs), (TracedBasis, ours)):
        for key, value in settings.items():
            setattr(args, key, value)
        trainer = kind(str(tiny_path), [parity_reward, length_reward], args, sums(), None)
        if kind is TracedBasis:
            assert trainer.objective.loss_type == args.loss_type
        trainer.train()
        found.append(trainer.trace)
    for (loss, gradient), (own_loss, own_gradient) in zip(*found, strict=True):
        assert own_loss == pytest.approx(loss, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-3, atol=1e-5)
