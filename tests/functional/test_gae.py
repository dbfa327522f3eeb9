"""GAE, the clipped value loss and its gradient: against plain loops over tokens."""

import math

import pytest
import torch

from basis_rl.functional.gae import (
    at_turn_ends,
    clipped_value_loss,
    explained_variance,
    gae,
    length_adaptive_lam,
    reward_to_go,
)

MASKS = {
    "ragged": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]],
    "tool output between": [[1, 1, 0, 0, 1], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]],
    "nothing sampled": [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]],
}


def batch(mask, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(mask).bool()
    rewards = torch.tensor([1.0, 0.0, math.nan, 0.7])
    values, kl = (torch.randn(mask.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return rewards, values, mask, kl


# Of each rollout of a batch: fewer than it has turns, none, of a rollout without a reward, and more.
TURNS = [[0.25], [], [9.0, 9.0], [0.5, -1.0, 2.0, 4.0]]


def turns_of(mask, row):
    """The columns of each turn."""
    turns = [[]]
    for column in range(mask.shape[1]):
        if mask[row, column]:
            turns[-1].append(column)
        elif turns[-1]:
            turns.append([])
    return [turn for turn in turns if turn]


def earned_at(mask, row, turn_rewards):
    """What a rollout gets at each column for its turns."""
    turns = turns_of(mask, row)
    earned = [0.0] * mask.shape[1]
    for place, number in enumerate(turn_rewards[row] if turn_rewards and turns else []):
        earned[turns[min(place, len(turns) - 1)][-1]] += number
    return earned


def by_loops(rewards, values, mask, kl, gamma, lam, turn_rewards=None):
    """The definition, as a double sum over the actions of each rollout."""
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(rewards)):
        places = [column for column in range(mask.shape[1]) if mask[row, column]]
        if math.isnan(rewards[row]):
            continue
        deltas = []
        earned = earned_at(mask, row, turn_rewards)
        for a, place in enumerate(places):
            last = a == len(places) - 1
            reward = earned[place] - (0.0 if kl is None else float(kl[row, place]))
            reward += float(rewards[row]) - sum(earned) if last else 0.0
            after = 0.0 if last else float(values[row, places[a + 1]])
            deltas.append(reward + gamma * after - float(values[row, place]))
        for a, place in enumerate(places):
            result[row, place] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[a:]))
    return result


@pytest.mark.parametrize("turn_rewards", [None, TURNS], ids=["at the end", "by turn"])
@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.97, 0.8)])
@pytest.mark.parametrize("case", MASKS)
def test_gae_is_the_sum_over_actions(case, gamma, lam, with_kl, turn_rewards):
    rewards, values, mask, kl = batch(MASKS[case])
    kl = kl if with_kl else None
    placed = None if turn_rewards is None else at_turn_ends(turn_rewards, mask)
    found = gae(rewards, values, mask, kl, placed, gamma=gamma, lam=lam)
    expected = by_loops(rewards, values, mask, kl, gamma, lam, turn_rewards)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (found[~mask] == 0).all()
    assert (found[2] == 0).all()


@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("case", MASKS)
def test_the_return_of_an_action_is_what_comes_from_it_on(case, with_kl):
    """Rewards of its turn and of later ones, and what is no turn's, less the KL; nothing outside the mask counts."""
    rewards, _, mask, kl = batch(MASKS[case])
    placed = at_turn_ends(TURNS, mask)
    garbage = torch.where(mask, placed, 7.0)
    found = reward_to_go(rewards, kl if with_kl else None, mask, garbage)
    assert found[2].isnan().all()
    for row in (0, 1, 3):
        earned = earned_at(mask, row, TURNS)
        assert placed[row].tolist() == earned
        for column in mask[row].nonzero().flatten().tolist():
            later = [c for c in range(column, mask.shape[1]) if mask[row, c]]
            expected = sum(earned[column:]) + float(rewards[row]) - sum(earned)
            expected -= sum(float(kl[row, c]) for c in later) if with_kl else 0.0
            assert float(found[row, column]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.5])
@pytest.mark.parametrize("case", MASKS)
def test_lambda_adapts_to_the_number_of_actions(case, alpha):
    """Of each rollout by itself: tool output between its actions does not make it longer."""
    rewards, values, mask, kl = batch(MASKS[case])
    found = gae(rewards, values, mask, kl, gamma=0.97, lam=length_adaptive_lam(alpha, mask))
    for row in range(len(rewards)):
        actions = max(sum(mask[row].tolist()), 1)
        lam = max(1 - 1 / (alpha * actions), 0.0)
        alone = [each[row : row + 1] for each in (rewards, values, mask, kl)]
        torch.testing.assert_close(found[row], by_loops(*alone, 0.97, lam)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
def test_value_loss_and_its_gradient(clip):
    generator = torch.Generator().manual_seed(0)
    old, moved, targets = (torch.randn((6, 7), generator=generator, dtype=torch.float64) for _ in range(3))
    predicted = (old + 0.5 * moved).requires_grad_()
    loss, clipped = clipped_value_loss(predicted, old, targets, clip)
    (gradient,) = torch.autograd.grad(loss.sum(), predicted)
    zeros = 0
    for i in range(6):
        for j in range(7):
            v, was, target = float(predicted.detach()[i, j]), float(old[i, j]), float(targets[i, j])
            plain, slope, chosen = (v - target) ** 2, v - target, 0.0
            if clip is not None:
                near = min(max(v, was - clip), was + clip)
                if (near - target) ** 2 > plain:
                    plain, slope, chosen = (near - target) ** 2, 0.0, 1.0
            zeros += slope == 0.0
            assert float(loss.detach()[i, j]) == pytest.approx(0.5 * plain, abs=1e-12)
            assert float(gradient[i, j]) == pytest.approx(slope, abs=1e-12)
            assert float(clipped[i, j]) == chosen
    assert (zeros > 0) == (clip == 0.2)


def test_explained_variance():
    returns = torch.tensor([[0.0, 1.0], [1.0, 5.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == pytest.approx(0.0)
    assert explained_variance(1.0 - returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones_like(returns), mask) is None
    assert explained_variance(returns, returns, torch.zeros_like(mask)) is None
