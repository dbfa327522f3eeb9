"""The study of token baselines: its policy, its exact gradients and its analysis against plain loops."""

import itertools
import math

import numpy as np
import pytest
import torch

from studies.otb import analysis as oa
from studies.otb import chain_policy as policy


@pytest.fixture(scope="module")
def chain():
    weights = policy.new_parameters(0, 26, width=8)
    weights = {name: 2 * value for name, value in weights.items()}
    ids = policy.respond(weights, torch.tensor([[3, 4]]).repeat(8, 1), 24, seed=0)
    return weights, ids


def test_rewards_follow_the_chain():
    end, pad = policy.END, policy.PAD
    rows = {
        (1, 1, 4, 5, end, pad, pad, pad): 1.0,
        (0, 1, 4, 6, end, pad, pad, pad): 0.0,  # 1 + 4 is not 6
        (1, 1, 3, 4, end, pad, pad, pad): 0.0,  # of the other parity
        (0, 8, 4, 2, 4, 6, end, pad): 1.0,  # 8 + 4 = 2 mod 10
        (1, 5, end, pad, pad, pad, pad, pad): 1.0,
        (1, 9, 3, 2, 1, 3, 4, 7): 0.0,  # no end
        (1, 1, 4, end, pad, pad, pad, pad): 0.0,  # ends between a step and its state
    }
    assert policy.reward(torch.tensor(list(rows))).tolist() == list(rows.values())
    walked = policy.walks(torch.Generator().manual_seed(0), 50, 200)
    ended = (walked == end).any(1)
    right = policy.reward(walked[ended]) == 1
    last = [row[row.index(end) - 1] % 2 == row[0] for row in walked[ended].tolist()]
    assert right.tolist() == last


def test_gradients_are_those_of_autograd_one_rollout_at_a_time(chain):
    weights, ids = chain
    lengths = policy.action_mask(ids).sum(1)
    assert lengths.min() < lengths.max()
    weightings = torch.randn(len(ids), 2, 24, generator=torch.Generator().manual_seed(1))
    found = policy.gradients(weights, ids, weightings, chunk=3)
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    for row in range(len(ids)):
        for k in range(2):
            total = (policy.log_probs(leaves, ids[row]) * weightings[row, k]).sum()
            grads = torch.autograd.grad(total, list(leaves.values()))
            assert torch.allclose(found[row, k], torch.cat([g.flatten() for g in grads]), atol=1e-4, rtol=1e-3)


def test_energies_are_squared_norms_of_the_gradient_in_the_logits(chain):
    weights, ids = chain
    energies = policy.energies(weights, ids)
    scores = policy.logits(weights, ids)[:, 1:-1, : policy.PAD]
    for row in range(3):
        for t in range(int(policy.action_mask(ids)[row].sum())):
            z = scores[row, t].double().clone().requires_grad_()
            (grad,) = torch.autograd.grad(z.log_softmax(-1)[ids[row, t + 2]], z)
            assert float(energies[row, t]) == pytest.approx(float(grad.square().sum()), abs=1e-5)


def test_moments_are_those_of_a_plain_loop():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    found = oa.moments(a, b)
    products = [float(a[k] @ b[j]) for k in range(5) for j in range(5) if k != j]
    assert found["along"] == pytest.approx(sum(products) / 20)
    apart = [float((row - a.mean(0)) @ (row - a.mean(0))) / 4 for row in a]
    assert [found["variance"], *oa.contributions(oa.deviations(a))] == pytest.approx([sum(apart), *apart])
    means = oa.group_means(torch.arange(12.0).view(6, 2), 3)
    assert means.tolist() == [[2.0, 3.0], [8.0, 9.0]]


def test_otb_variances_of_drawn_groups_are_those_of_a_plain_loop():
    means = np.random.default_rng(2).normal(size=(2, 5, 7))
    products, counts = torch.stack([oa.deviations(torch.tensor(m)) for m in means]), oa.resamples(3, 2, 5, seed=0)
    loop = [[np.repeat(means[p], row[p], 0).var(0, ddof=1).sum() for p in (0, 1)] for row in counts.long().numpy()]
    assert oa.resampled_variances(products, counts).tolist() == pytest.approx(np.mean(loop, axis=1))


def test_otb_intervals_of_few_groups_hold_the_true_ratio():
    held, counts = 0, oa.resamples(400, 4, 6, seed=0)
    for seed in range(200):  # variances of 0.6^2 + 0.3^2 to 1, at 4 prompts of 6 groups
        b, c = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 4, 6, 5)))
        products = [torch.stack([*map(oa.deviations, x)]) for x in (0.6 * b + 0.3 * c, b)]
        low, high = oa.interval(*(oa.resampled_variances(x, counts) for x in products))
        held += low <= 0.45 <= high
    assert 0.92 * 200 <= held <= 0.98 * 200


def test_a_group_mean_keeps_one_less_than_all_of_the_gradient_and_normalises_to_rloo():
    generator = torch.Generator().manual_seed(3)
    rewards = torch.randint(0, 2, (64,), generator=generator).float()
    scores = torch.randn(64, 9, generator=generator) + rewards[:, None]
    mask, ones = torch.ones(64, 3, dtype=torch.bool), torch.ones(64, 3)
    means = {
        name: oa.group_means(oa.advantages(oa.BASELINES[name], rewards, mask, ones, 4)[:, None] * scores, 4)
        for name in ("group mean", "rloo")
    }
    rows = {name: oa.pooled([oa.moments(each, means["rloo"])]) for name, each in means.items()}
    assert rows["rloo"]["kept"] == pytest.approx(1)
    assert rows["group mean"]["kept"] == pytest.approx(3 / 4)
    assert rows["group mean"]["normalised"] == pytest.approx(rows["rloo"]["normalised"])


def test_the_correlation_within_places_knows_nothing_of_their_means():
    places, noise = torch.arange(60) % 5, torch.from_numpy(np.random.default_rng(1).normal(size=(2, 60)))
    x, y = noise[0], 0.5 * noise[0] + noise[1]
    left = [side.clone() for side in (x, y)]
    for place, side in itertools.product(range(5), left):
        side[places == place] -= side[places == place].mean()
    expected = float(torch.corrcoef(torch.stack(left))[0, 1])
    assert oa.correlation_within(x + 100 * places, y + 50 * places, places) == pytest.approx(expected)
    assert oa.correlation(x + 100 * places, y + 50 * places) > 0.99


def test_the_error_of_what_is_kept_is_a_jackknife_over_prompts():
    rows = [{"variance": 1.0, "along": a, "norm2": 1.0, "signal": s} for a, s in ((1.0, 2.0), (2.0, 2.0), (4.0, 5.0))]
    found = oa.pooled(rows)
    left = [6 / 7, 5 / 7, 3 / 4]
    center = sum(left) / 3
    assert found["kept"] == pytest.approx(7 / 9)
    assert found["kept, error"] == pytest.approx(math.sqrt(2 / 3 * sum((x - center) ** 2 for x in left)))
    assert found["normalised"] == pytest.approx(81 / 49)


def test_true_norms_as_weights_are_a_weighted_mean():
    rewards, norms = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 3.0, 2.0, 2.0])
    assert oa.true_norm_advantages(rewards, norms, 2).tolist() == pytest.approx([0.75, -0.25, 0.0, 0.0])
