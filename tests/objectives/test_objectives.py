"""The contract of an objective: what is in the registry keeps it, and what breaks it is told how, all at once."""

import math
from dataclasses import replace

import pytest
import torch

from basis_rl.conformance import ObjectiveError, check_objective
from basis_rl.conformance.objectives import example_inputs, reads_delta
from basis_rl.objectives import (
    OBJECTIVES,
    LossInputs,
    LossOutputs,
    Objective,
    TrlObjective,
    build_objective,
    for_token_advantages,
    objective,
    objective_name,
)
from examples.custom_objective import simple
from tests.support.loss_run import FakeRun, micro_batch

ALL = ["finite", "masked_tokens", "gradient_at_ratio_1", "token_advantages", "row_order", "purity"]
OWN = [name for name, found in OBJECTIVES.items() if isinstance(found, Objective)]


@pytest.mark.parametrize("found", [*OWN, simple])
def test_own_objectives_keep_the_contract(found):
    assert check_objective(found) == ALL


@pytest.mark.parametrize("delta", [None, 1.1])
@pytest.mark.parametrize("token_advantages", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_gspo_token_is_the_papers_loop(seed, token_advantages, delta):
    """With one advantage per rollout its loss and gradient are GSPO's; `delta` bounds the ratio that is not clipped."""
    inputs = example_inputs(OBJECTIVES["gspo_token"], seed=seed, token_advantages=token_advantages)
    inputs = replace(inputs, settings=replace(inputs.settings, delta=delta, epsilon_low=0.1, epsilon_high=0.05))
    mask, settings = inputs.mask, inputs.settings
    outputs = OBJECTIVES["gspo_token"](inputs)
    gradient = torch.autograd.grad((outputs.per_token * mask).sum(), inputs.log_probs)[0]
    for row in range(len(mask)):
        tokens = mask[row].nonzero().flatten().tolist()
        steps = [float(inputs.log_probs[row, t].detach() - inputs.old_log_probs[row, t]) for t in tokens]
        for t in tokens:
            ratio = math.exp(sum(steps) / len(steps))
            advantage = float(inputs.advantages[row, t] if token_advantages else inputs.advantages[row])
            free = min(ratio, delta or ratio) * advantage
            clipped = min(max(ratio, 1 - settings.epsilon_low), 1 + settings.epsilon_high) * advantage
            moves = free <= clipped and ratio <= (delta or ratio)
            assert float(outputs.per_token[row, t]) == pytest.approx(-min(free, clipped))
            assert float(gradient[row, t]) == pytest.approx(-free if moves else 0.0)
            assert float(outputs.metrics["clipped"][row, t]) == float(clipped < free)


def test_only_gspo_has_a_form_for_tokens():
    assert for_token_advantages(OBJECTIVES["gspo"]) == OBJECTIVES["gspo_token"]
    assert all(for_token_advantages(each) == each for name, each in OBJECTIVES.items() if name != "gspo")


TRLS = [OBJECTIVES[name] for name in OBJECTIVES if name not in OWN]
TRLS += [TrlObjective(loss_type, "sequence") for loss_type in ("cispo", "vespo", "dapo", "sapo")]


@pytest.mark.parametrize("found", TRLS, ids=objective_name)
def test_declarations_of_trls_objectives_are_true(found):
    """Token advantages with the same mean over each rollout: another gradient, or the very same."""
    batch = micro_batch(tokens=True)
    mask = batch["completion_mask"]
    batch["advantages"] = batch["advantages"].abs()  # of one sign: clipping acts on all of a rollout's alike
    mean = (batch["advantages"] * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    run = FakeRun(found, epsilon=1e9, epsilon_high=1e9)
    _, own, _ = run.loss(batch)
    _, averaged, _ = run.loss({**batch, "advantages": mean.expand(mask.shape)})
    assert found.token_advantages == (not torch.allclose(own, averaged, rtol=1e-6, atol=1e-9))
    assert own.abs().max() > 1e-3


@pytest.mark.parametrize("name", OBJECTIVES)
def test_which_objectives_read_delta_is_told_rightly(name):
    batch = micro_batch()
    losses = [FakeRun(OBJECTIVES[name], delta=delta).loss(batch)[0] for delta in (None, 0.5)]
    assert reads_delta(OBJECTIVES[name]) is not torch.equal(*losses)


def test_names():
    assert objective_name(TrlObjective("grpo", "sequence")) == "gspo"
    assert objective_name(TrlObjective("dapo", "sequence")) == "dapo with sequence ratios"
    assert objective_name(OBJECTIVES["gpg"]) == "gpg"
    assert objective_name(simple) == "examples.custom_objective:simple"
    assert build_objective("examples.custom_objective:simple") == simple
    assert build_objective("gspo") is OBJECTIVES["gspo"]
    assert build_objective(simple) is simple


def undeclared(inputs):
    raise AssertionError("it is refused before it is called")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gsp", "Unknown objective 'gsp'. Did you mean 'gspo'"),
        ("no.such.module:mine", "cannot be imported"),
        ("tests.objectives.test_objectives:undeclared", r"Decorate the function: .*objective\(token_advantages=True\)"),
        (undeclared, "Objective 'undeclared' does not declare"),
        ("tests.objectives.test_objectives:ALL", "is a list, no function"),
        (LossInputs, "is a type, no function"),
    ],
)
def test_what_is_no_objective_is_told_the_way_out(given, message):
    with pytest.raises(ValueError, match=message):
        build_objective(given)


def surrogate(inputs):
    return -inputs.ratio * inputs.token_advantages


def of(per_token, aggregation="token_mean", **metrics):
    return LossOutputs(per_token=per_token, aggregation=aggregation, metrics=metrics)


def averages_tokens(inputs):
    tokens = inputs.mask.sum(1, keepdim=True).clamp(min=1)
    mean = (inputs.token_advantages.expand(inputs.mask.shape) * inputs.mask).sum(1, keepdim=True) / tokens
    return of(-inputs.ratio * mean)


def times(factor, act=lambda inputs: None):
    """The surrogate, with each loss multiplied by ``factor(inputs)``, after ``act(inputs)``."""

    def loss(inputs):
        act(inputs)
        return of(surrogate(inputs) * factor(inputs))

    return loss


def with_ratio(of_ratio):
    """The surrogate, with a metric ``of_ratio(ratio)``."""
    return lambda inputs: of(surrogate(inputs), ratio=of_ratio(inputs.ratio))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (times(lambda inputs: -1.0), "gradient_at_ratio_1: .*does not raise"),
        (times(lambda inputs: inputs.mask.shape[1]), "masked_tokens: .*how far the micro-batch is padded"),
        (times(lambda inputs: (inputs.ratio**200).detach()), "finite: the loss or its gradient is not finite"),
        (times(lambda inputs: torch.where(inputs.token_advantages > 0, 2.0, 1.0)), "gradient_at_ratio_1: .*REINFORCE"),
        (
            times(lambda inputs: 1.0 + (torch.arange(len(inputs.mask)) == 0)[:, None] * (inputs.ratio.detach() != 1)),
            "row_order: .*order of the rollouts",
        ),
        (averages_tokens, "token_advantages: it declares token_advantages = True"),
        (
            times(lambda inputs: 1.0, act=lambda inputs: inputs.advantages[0].fill_(2.0)),
            "purity: writes into .*advantages",
        ),
        (lambda inputs: of(surrogate(inputs) + torch.rand(inputs.mask.shape)), "purity: .*second time"),
        (lambda inputs: of(surrogate(inputs).sum(1)), r"finite: raises ValueError: .*losses of shape \(5,\)"),
        (
            lambda inputs: of(surrogate(inputs), "median"),
            "finite: raises ValueError: .*the aggregation 'median'. Known: ",
        ),
        (with_ratio(lambda ratio: ratio), "purity: metrics with gradient"),
        (
            with_ratio(lambda ratio: ratio.detach().sum(1)),
            r"finite: raises ValueError: .*the metric 'ratio' of shape \(5,\)",
        ),
        (with_ratio(lambda ratio: torch.nan * ratio.detach()), r"finite: metrics that are not finite: \['ratio'\]"),
        (lambda inputs: {}["temperature"], "finite: raises KeyError: 'temperature'"),
        (surrogate, "finite: raises ValueError: .*returned a Tensor, not LossOutputs"),
    ],
)
def test_broken_objectives_are_told_what_they_break(function, message):
    with pytest.raises(ObjectiveError, match=message):
        check_objective(objective(token_advantages=True)(function))


def test_averaging_is_allowed_where_it_is_declared_and_losses_of_trl_are_not_checked():
    check_objective(objective(token_advantages=False)(averages_tokens))
    with pytest.raises(ValueError, match="'gspo' is a loss of TRL's"):
        check_objective("gspo")


def test_an_objective_sees_nothing_outside_the_mask():
    seen = []

    @objective(token_advantages=True)
    def keep(inputs):
        seen.append(inputs)
        return of(surrogate(inputs))

    given = example_inputs(keep, token_advantages=True)
    rubbish = {
        name: torch.where(given.mask, getattr(given, name), torch.nan)
        for name in ("log_probs", "old_log_probs", "advantages", "entropy")
    }
    keep(replace(given, **rubbish, mask=given.mask.long()))
    (inputs,) = seen
    assert inputs.mask.dtype == torch.bool
    for name in rubbish:
        assert (getattr(inputs, name)[~given.mask] == 0).all(), name
    assert torch.equal(inputs.log_probs[given.mask], given.log_probs[given.mask])
