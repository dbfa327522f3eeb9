"""The objectives of other trainers, each against a loop over tokens written from its equation."""

import math
from dataclasses import replace

import pytest
import torch

from basis_rl.conformance.objectives import example_inputs
from basis_rl.objectives import OBJECTIVES, LossInputs, Objective
from tests.support.loss_run import FakeRun, micro_batch

BAND = {"epsilon_low": 0.15, "epsilon_high": 0.25}


def inputs_of(name, seed, token_advantages=False, **settings):
    inputs = example_inputs(OBJECTIVES[name], seed=seed, token_advantages=token_advantages)
    return replace(inputs, settings=replace(inputs.settings, **{**BAND, **settings}))


def losses_and_gradients(name, inputs):
    outputs = OBJECTIVES[name](inputs)
    (gradient,) = torch.autograd.grad((outputs.per_token * inputs.mask).sum(), inputs.log_probs)
    return outputs, gradient


def tokens_of(inputs):
    """Of each action token: where it is, its two log-probabilities, and its advantage."""
    for row, token in inputs.mask.nonzero().tolist():
        advantage = float(inputs.token_advantages.expand(inputs.mask.shape)[row, token])
        logs = (float(each.detach()[row, token]) for each in (inputs.log_probs, inputs.old_log_probs))
        yield row, token, *logs, advantage


def dis(new, old, advantage, low, high, _):
    ratio = math.exp(new - old)
    kept = 1 - low <= ratio <= 1 + high
    return kept, -ratio * advantage if kept else 0.0, -ratio * advantage if kept else 0.0


def dppo(new, old, advantage, low, high, delta, divergence):
    wrong_way = new > old and divergence > high if advantage > 0 else new < old and divergence > low
    weight = min(math.exp(new - old), 20.0 if delta is None else delta)
    return not wrong_way, 0.0 if wrong_way else -weight * advantage * new, 0.0 if wrong_way else -weight * advantage


def dppo_tv(new, old, *rest):
    return dppo(new, old, *rest, abs(math.exp(new) - math.exp(old)))


def dppo_kl(new, old, *rest):
    pi, mu = math.exp(new), math.exp(old)
    others = math.log((1 - mu + 1e-8) / (1 - pi + 1e-8))
    return dppo(new, old, *rest, mu * (old - new) + (1 - mu) * others)


def ipo(new, old, advantage, low, high, _):
    ratio = math.exp(new - old)
    kept = -low <= math.exp(new) - math.exp(old) <= high
    surrogate = -ratio * advantage if kept else 0.0
    return kept, surrogate + 1e-3 * (new - old) ** 2, surrogate + 2e-3 * (new - old)


@pytest.mark.parametrize("delta", [None, 1.1])
@pytest.mark.parametrize("token_advantages", [False, True])
@pytest.mark.parametrize("equation", [dis, dppo_tv, dppo_kl, ipo])
def test_tokens_that_moved_too_far_are_left_out(equation, token_advantages, delta):
    name = equation.__name__
    kept = []
    for seed in range(6):
        inputs = inputs_of(name, seed, token_advantages, delta=delta, **({"epsilon_low": 0.02} if seed % 2 else {}))
        # Some have moved far, and some have no small probability.
        old = torch.where(inputs.mask, inputs.old_log_probs * 0.4, 0.0).clamp(max=-0.01)
        inputs = replace(inputs, old_log_probs=old)
        outputs, gradient = losses_and_gradients(name, inputs)
        for row, token, *given in tokens_of(inputs):
            bounds = (inputs.settings.epsilon_low, inputs.settings.epsilon_high, delta)
            stays, loss, slope = equation(*given, *bounds)
            kept.append(stays)
            assert float(outputs.per_token[row, token]) == pytest.approx(loss)
            assert float(gradient[row, token]) == pytest.approx(slope)
            assert float(outputs.metrics["masked"][row, token]) == float(not stays)
    assert 0.1 < sum(kept) / len(kept) < 0.95, "one of the cases is hardly seen"


@pytest.mark.parametrize("seed", range(4))
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(seed):
    inputs = inputs_of("gmpo", seed)
    outputs, gradient = losses_and_gradients("gmpo", inputs)
    for row in range(len(inputs.mask)):
        tokens = [each for each in tokens_of(inputs) if each[0] == row]
        advantage = float(inputs.advantages[row])
        held = []
        for *_, new, old, _ in tokens:
            bounded = min(max(new - old, -0.15), 0.25)
            held.append(min(new - old, bounded) if advantage > 0 else max(new - old, bounded))
        for (_, token, new, old, _), own in zip(tokens, held, strict=True):
            loss = -advantage * math.exp(sum(held) / len(held))
            assert float(outputs.per_token[row, token]) == pytest.approx(loss)
            # Each token's loss is that of the rollout, so all of them together move it.
            assert float(gradient[row, token]) == pytest.approx(loss if own == new - old else 0.0)


def wide(name, seed, rows=6, length=2000):
    """A micro-batch that is large enough for a share of 0.02 %."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -4 * torch.rand(rows, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=generator) < 0.9
    old = log_probs + 0.2 * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    inputs = LossInputs(
        log_probs=log_probs.requires_grad_(),
        old_log_probs=old,
        advantages=2 * torch.randn(rows, generator=generator, dtype=torch.float64),
        mask=mask,
        entropy=torch.zeros(rows, length, dtype=torch.float64),
    )
    return inputs, *losses_and_gradients(name, inputs)


def covariances(inputs):
    found = list(tokens_of(inputs))
    mean_advantage = sum(each[4] for each in found) / len(found)
    mean_log = sum(each[2] for each in found) / len(found)
    return {each[:2]: (each[4] - mean_advantage) * (each[2] - mean_log) for each in found}


@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_holds_the_tokens_that_vary_most_with_their_advantage(seed):
    inputs, outputs, _ = wide("kl_cov", seed)
    found = covariances(inputs)
    count = int(2e-4 * len(found))
    assert count >= 2
    held = set(sorted(found, key=found.__getitem__)[-count:])
    for row, token, new, old, advantage in tokens_of(inputs):
        is_held = (row, token) in held
        loss = -math.exp(new - old) * advantage + (abs(new - old) if is_held else 0.0)
        assert float(outputs.per_token[row, token]) == pytest.approx(loss)
        assert bool(outputs.metrics["penalised"][row, token]) == is_held


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_drops_some_tokens_of_middling_covariance(seed):
    inputs, outputs, gradient = wide("clip_cov", seed)
    found = covariances(inputs)
    dropped = {tuple(each) for each in outputs.metrics["dropped"].nonzero().tolist()}
    assert len(dropped) == int(2e-4 * len(found))
    for row, token, new, old, advantage in tokens_of(inputs):
        ratio = math.exp(new - old)
        free, clipped = ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage
        if (row, token) in dropped:
            assert 1 < found[row, token] < 5
            assert free <= clipped, "it was clipped anyway"
            assert float(gradient[row, token]) == 0.0
        else:
            assert float(outputs.per_token[row, token]) == pytest.approx(-min(free, clipped))
    others = wide("clip_cov", seed + 10)[1]
    assert not torch.equal(others.metrics["dropped"], outputs.metrics["dropped"])


def test_a_sure_token_whose_log_probability_is_rounded_above_0_has_moved():
    inputs = inputs_of("dppo_kl", 0)
    shape = inputs.mask.shape
    sure = torch.full(shape, 1.2e-7, requires_grad=True)
    moved = replace(inputs, log_probs=sure, old_log_probs=torch.full(shape, -1.0), advantages=torch.ones(shape[0]))
    outputs = OBJECTIVES["dppo_kl"](moved)
    assert outputs.metrics["masked"][inputs.mask].all()


OWN = [name for name, found in OBJECTIVES.items() if isinstance(found, Objective)]


@pytest.mark.parametrize("name", OWN)
def test_whether_rollouts_depend_on_the_others_of_their_micro_batch_is_declared_rightly(name):
    inputs, together, _ = wide(name, 0)
    alone = []
    for row in range(len(inputs.mask)):
        own = {key: x[row : row + 1] for key, x in vars(inputs).items() if isinstance(x, torch.Tensor)}
        alone.append(OBJECTIVES[name](replace(inputs, **own)).per_token)
    same = torch.equal(torch.cat(alone) * inputs.mask, together.per_token * inputs.mask)
    assert same is not OBJECTIVES[name].by_micro_batch


@pytest.mark.parametrize("name", ["dis", "dppo_tv", "dppo_kl", "ipo"])
def test_the_ratio_is_to_the_engine_that_sampled(name):
    """Whatever the old policy and the run's own weights are; tokens that the engine does not tell have the old one."""
    batch = micro_batch(tokens=True)
    sampled = batch["old_per_token_logps"] + 0.1
    sampled[0, 0] = torch.nan
    batch |= {"sampling_per_token_logps": sampled}
    run = FakeRun(OBJECTIVES[name])
    _, found, _ = run.loss({**batch, "importance_sampling_ratio": torch.full_like(sampled, 0.3)})
    known = torch.where(sampled.isnan(), batch["old_per_token_logps"], sampled)
    _, expected, _ = run.loss({**batch, "old_per_token_logps": known, "sampling_per_token_logps": known})
    torch.testing.assert_close(found, expected)
    _, other, _ = run.loss({**batch, "sampling_per_token_logps": batch["old_per_token_logps"]})
    assert not torch.allclose(found, other)
