"""The bias of a gradient from rollouts of an older policy, and of taking rollouts in the order in which they end.

A softmax policy with logits of its own for each prefix, every sequence enumerated. Token 0 ends a sequence; the longest
have T tokens. ``p`` is the policy that is trained, ``q`` the one that sampled, ``Delta`` the distance of their logits,
``A = reward - belief`` with ``|A| <= M``, ``s_t`` the gradient of token t's log-probability, and ``W = p(y) / q(y)``.
The estimate ``E_q[A sum_t w_t s_t]`` with weights ``w`` misses the gradient ``E_q[A sum_t W s_t]`` by the expectation
of ``A sum_t (w_t - W) s_t``. Gradients of different prefixes are orthogonal and ``|s_t| <= sqrt(2)``, so

    |bias| <= M sqrt(2) E_q sqrt(sum_t (w_t - W)^2)                                                        (1)

which `deviation` bounds further, by total variation ``TV`` and the bound c of the weights. Last,
``p - q = int_0^1 p_u (S_u . delta) du`` along the line between the logits, and the Fisher matrix of a softmax has no
eigenvalue above 1/2, so ``TV <= Delta / sqrt(8)``.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from basis_rl.functional.objectives import importance_weights
from basis_rl.functional.pacing import batches_left, next_batch

MODES = ["none", "exact", "sequence_truncate", "sequence_mask", "token_truncate", "token_mask"]
BELIEF = 0.4


@dataclass
class Space:
    """All sequences: tokens ``(N, T)``, contexts ``(N, T)`` (the prefix's number) and the mask of their tokens."""

    tokens: torch.Tensor
    contexts: torch.Tensor
    mask: torch.Tensor
    prefixes: int

    @property
    def longest(self):
        return self.tokens.shape[1]


def space(vocabulary, longest):
    prefixes = [p for n in range(longest) for p in itertools.product(range(1, vocabulary), repeat=n)]
    ends = [(*p, t) for p in prefixes for t in range(vocabulary) if t == 0 or len(p) == longest - 1]
    tokens = torch.zeros(len(ends), longest, dtype=torch.long)
    contexts, mask = tokens.clone(), tokens.double()
    for row, sequence in enumerate(ends):
        for t, token in enumerate(sequence):
            tokens[row, t] = token
            contexts[row, t] = prefixes.index(sequence[:t])
            mask[row, t] = 1.0
    return Space(tokens, contexts, mask, len(prefixes))


def log_probs(on, logits):
    """Of each token ``(N, T)``, 0 after the end."""
    return logits.log_softmax(-1)[on.contexts, on.tokens] * on.mask


def scores(on, logits):
    """``s_t``, ``(N, T, prefixes * V)``."""
    size = logits.shape[1]
    found = torch.zeros(*on.tokens.shape, on.prefixes, size, dtype=torch.float64)
    own = torch.nn.functional.one_hot(on.tokens, size) - logits.softmax(-1)[on.contexts]
    found.scatter_(2, on.contexts[:, :, None, None].expand(-1, -1, 1, size), own[:, :, None])
    return (found * on.mask[:, :, None, None]).flatten(2)


def weights(on, new, old, mode, bound):
    """``w``, ``(N, 1)`` or ``(N, T)``: the package's, as TRL has them."""
    if mode == "none":
        return torch.ones(len(on.tokens), 1, dtype=torch.float64)
    name, highest = ("sequence_truncate", None) if mode == "exact" else (mode, bound)
    return importance_weights(log_probs(on, new), log_probs(on, old), on.mask, name, None, highest)


def gradient(on, new, old, reward, mode="exact", bound=None, belief=BELIEF):
    """Expectation of the estimate ``A sum_t w_t s_t`` over the sequences of `old`."""
    chances = log_probs(on, old).sum(1).exp()
    each = (weights(on, new, old, mode, bound)[:, :, None] * scores(on, new)).sum(1)
    return (chances * (reward - belief)) @ each


def true_gradient(on, logits, reward):
    """By autograd, of the expected reward."""
    logits = logits.clone().requires_grad_()
    expected = (log_probs(on, logits).sum(1).exp() * reward).sum()
    return torch.autograd.grad(expected, logits)[0].flatten()


def total_variation(on, new, old):
    return 0.5 * float((log_probs(on, new).sum(1).exp() - log_probs(on, old).sum(1).exp()).abs().sum())


def one_position(on, new, old, position):
    """``m_t``: old logits, but new ones for token t; what the weight of one token corrects."""
    at = on.contexts[:, position][on.mask[:, position] > 0].unique()
    mixed = old.clone()
    mixed[at] = new[at]
    return mixed


def deviation(on, new, old, mode, c):
    """``|bias| <= M * deviation``, from (1): by ``TV`` and what the bound c cuts off."""
    p, q = log_probs(on, new), log_probs(on, old)
    every_p, every_q = p.sum(1).exp(), q.sum(1).exp()
    norm = math.sqrt(2 * on.longest)
    if mode == "none":
        return norm * 2 * total_variation(on, new, old)
    if mode == "exact":
        return 0.0
    if mode == "sequence_truncate":
        return norm * float((every_p - c * every_q).clamp_min(0).sum())
    if mode == "sequence_mask":
        return norm * float(every_p[every_p > c * every_q].sum())
    found = 0.0
    for t in range(on.longest):
        mixed = one_position(on, new, old, t)
        ratio = (p - q)[:, t].exp()
        lost = (ratio - c).clamp_min(0) if mode == "token_truncate" else ratio * (ratio > c)
        found += 2 * total_variation(on, mixed, new) + float((every_q * lost * on.mask[:, t]).sum())
    return math.sqrt(2) * found


def by_distance(on, distance, mode, c):
    """The same by ``Delta`` alone."""
    size, tail = on.longest, c / (c - 1)
    sequence = 0.0 if math.sqrt(2 * size) * distance <= math.log(c) else 0.5 * math.sqrt(size) * distance
    token = 0.0 if math.sqrt(2) * distance <= math.log(c) else 0.5 * size * distance
    return {
        "none": math.sqrt(size) * distance,
        "exact": 0.0,
        "sequence_truncate": sequence,
        "sequence_mask": tail * sequence,
        "token_truncate": size * distance + token,
        "token_mask": size * distance + tail * token,
    }[mode]


def drawn_case(seed, vocabulary=3, longest=3, far=None):
    """Space, new and old logits, rewards in [0, 1]; logits that are `far` apart, or at a random distance."""
    on, rng = space(vocabulary, longest), torch.Generator().manual_seed(seed)
    old = 1.5 * torch.randn(on.prefixes, vocabulary, generator=rng, dtype=torch.float64)
    step = torch.randn(on.prefixes, vocabulary, generator=rng, dtype=torch.float64)
    distance = 10 ** float(torch.rand(1, generator=rng) * 3 - 2) if far is None else far
    reward = torch.rand(len(on.tokens), generator=rng, dtype=torch.float64).round(decimals=1)
    return on, old + distance * step / step.norm(), old, reward


def bias_of(on, new, old, reward, mode, c, belief=BELIEF):
    return float((gradient(on, new, old, reward, mode, c, belief) - true_gradient(on, new, reward)).norm())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_every_mode_is_unbiased_without_staleness(mode, seed):
    on, new, _, reward = drawn_case(seed)
    assert bias_of(on, new, new, reward, mode, 3.0) < 1e-12


def test_a_belief_adds_no_bias_with_whole_weights_and_adds_some_without():
    """The bias of `token_truncate` without a bound does not depend on the belief; without weights, and cut, it does."""
    on, new, old, reward = drawn_case(0, far=3.0)

    def moved(mode, c):
        zero, five = (gradient(on, new, old, reward, mode, c, belief) for belief in (0.0, 5.0))
        return float((five - zero).norm())

    assert moved("exact", None) < 1e-12
    assert moved("token_truncate", None) < 1e-12
    assert min(moved("none", None), moved("token_truncate", 1.1), moved("sequence_mask", 1.1)) > 0.01


@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (3, 3), (4, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_the_bias_is_within_the_bounds(mode, shape):
    for seed, c in itertools.product(range(10), (1.05, 1.5, 3.0)):
        on, new, old, reward = drawn_case(seed, *shape)
        largest = float((reward - BELIEF).abs().max())
        bias = bias_of(on, new, old, reward, mode, c)
        bound = largest * deviation(on, new, old, mode, c)
        assert bias <= bound + 1e-10
        assert bound <= largest * by_distance(on, float((new - old).norm()), mode, c) + 1e-10


@pytest.mark.parametrize("mode", ["none", "sequence_truncate", "sequence_mask", "token_truncate", "token_mask"])
def test_the_bounds_are_not_vacuous(mode):
    """Two tokens of which one has become ten times as likely: the bias is more than 0.45 of the bound."""
    on = space(2, 1)
    old, new = (torch.tensor([[math.log(p), math.log(1 - p)]], dtype=torch.float64) for p in (0.005, 0.05))
    reward = torch.tensor([1.0, 1.0 if mode == "none" else 0.0], dtype=torch.float64)
    bias = bias_of(on, new, old, reward, mode, 3.0, belief=0.0)
    assert 0.45 * deviation(on, new, old, mode, 3.0) < bias <= deviation(on, new, old, mode, 3.0)
    if mode == "none":
        close, even = torch.tensor([[0.01, -0.01]]).double() / math.sqrt(2), torch.zeros(1, 2).double()
        assert bias_of(on, close, even, reward, mode, 3.0, 0.0) > 0.45 * by_distance(on, 0.01, mode, 3.0)


def test_token_weights_are_biased_without_any_bound():
    """They correct each token, and not the tokens before and after it, so a sequence of one token is exact."""
    biases = {}
    for length in (1, 2, 3):
        on, new, old, reward = drawn_case(1, longest=length, far=1.0)
        biases[length] = bias_of(on, new, old, reward, "token_truncate", None)
    assert biases[1] < 1e-12
    assert min(biases[2], biases[3]) > 0.001


def test_token_weights_have_about_half_of_the_bias_without_weights_and_sometimes_more():
    """The figures of docs/streaming.md."""
    cases = [drawn_case(seed, far=0.3) for seed in range(200)]
    without = torch.tensor([bias_of(*case, "none", None) for case in cases])
    by_token = torch.tensor([bias_of(*case, "token_truncate", None) for case in cases])
    assert 0.4 < float(by_token.median() / without.median()) < 0.6
    assert int((by_token > without).sum()) == 24


def streamed(lengths, batches, staleness):
    """Batch and age of each rollout: one per batch, a token per tick, a tick of training; each ends when its length
    says so."""
    began = dict.fromkeys(range(min(batches, len(lengths))), (0, 0))
    ended, used, now = [], {}, 0
    for step in range(len(lengths)):
        while True:
            open_ones = [each for each in began if each not in used and each not in ended]
            ended += sorted(each for each in open_ones if now >= began[each][1] + lengths[each])
            left = {each: batches_left(step - began[each][0], staleness, 1, 1) for each in began}
            running = [left[each] for each in open_ones if each not in ended]
            chosen = next_batch([left[each] for each in ended], running, 1)
            if chosen is not None:
                break
            now += 1
        [taken] = [ended[index] for index in chosen]
        ended.remove(taken)
        used[taken] = (step, step - began[taken][0])
        if len(began) < len(lengths):
            began[len(began)] = (step, now)
        now += 1
    return [used[index] for index in range(len(lengths))]


def every_run(on, count, batches, staleness):
    """All outcomes of `count` rollouts: their sequences, and batch and age of each."""
    lengths = on.mask.sum(1).long().tolist()
    for rows in itertools.product(range(len(lengths)), repeat=count):
        yield rows, streamed([lengths[row] for row in rows], batches, staleness)


def batch_gradients(on, path, reward, count, batches, staleness):
    """Expected gradient of each batch with exact weights, where step k trains logits ``path[k]``; and of those with
    age 1, its probability and what it adds."""
    chances = [log_probs(on, logits).sum(1).exp() for logits in path]
    each = [(reward - BELIEF)[:, None] * scores(on, logits).sum(1) for logits in path]
    found = torch.zeros(count, each[0].shape[1], dtype=torch.float64)
    early, share = torch.zeros(each[0].shape[1], dtype=torch.float64), 0.0
    for rows, places in every_run(on, count, batches, staleness):
        sampled = [chances[step - age][row] for row, (step, age) in zip(rows, places, strict=True)]
        chance = torch.stack(sampled).prod()
        for row, (step, age), q in zip(rows, places, sampled, strict=True):
            found[step] += chance * chances[step][row] / q * each[step][row]
            if age == 1 and batches <= step < count - batches:
                early += chance * each[step][row]
                share += float(chance)
    return found, early / max(share, 1e-300), share


@pytest.mark.parametrize(("batches", "staleness"), [(1, 4), (2, 2), (2, 4), (3, 3)])
def test_a_whole_run_with_fixed_weights_is_unbiased_and_one_batch_need_not_be(batches, staleness):
    """One batch takes a share of ``1 / B`` of what is there, so it is off by ``2 (1 - 1 / B) M sqrt(2 T)`` at most; and
    by nothing where the pace leaves no choice: with B = 1, and with B = max_staleness after B + 1 batches."""
    on, logits, _, reward = drawn_case(3, vocabulary=2, longest=3)
    true, count = true_gradient(on, logits, reward), 6
    found, early, share = batch_gradients(on, [logits] * count, reward, count, batches, staleness)
    assert float((found.sum(0) - count * true).norm()) < 1e-10
    off = (found - true).norm(dim=1)
    largest = float((reward - BELIEF).abs().max()) * math.sqrt(2 * on.longest)
    assert float(off.max()) <= 2 * (1 - 1 / batches) * largest + 1e-10
    if batches == 1:
        assert float(off.max()) < 1e-10
        return
    assert float(off[0]) > float(true.norm())
    if batches == staleness:
        assert float(off[batches + 1 :].max()) < 1e-10
        return
    # Far from both ends of the run, what ended early and what ended late make up for each other in a batch.
    assert share > 0.05
    assert float((early - true).norm()) > float(true.norm())
    assert float(off[4]) < 0.002 * float(true.norm())


def test_the_order_of_ending_adds_to_the_bias_of_a_run_only_as_much_as_the_weights_move():
    """With exact weights. A rollout is fresh for the logits it began with; used later its gradient has moved by at most
    ``M exp(sqrt(2 T) Delta) (2 T + 1/2) Delta``, with the Delta of `max_staleness` steps."""
    count, staleness = 5, 3
    on, new, logits, reward = drawn_case(3, vocabulary=2, longest=3, far=1.0)
    largest, size = float((reward - BELIEF).abs().max()), on.longest
    off = {}
    for rate in (0.0, 0.01, 0.1):
        path = [logits + rate * step * (new - logits) for step in range(count)]
        found, _, _ = batch_gradients(on, path, reward, count, 2, staleness)
        # Two begin with the first logits, and then one with those of each batch that is taken.
        expected = sum(true_gradient(on, path[step], reward) for step in (0, 0, *range(1, count - 1)))
        off[rate] = float((found.sum(0) - expected).norm())
        moved = staleness * rate
        bound = count * largest * math.exp(math.sqrt(2 * size) * moved) * (2 * size + 0.5) * moved
        assert off[rate] <= bound + 1e-10
    assert off[0.0] < 1e-10
    assert 0 < off[0.01] < 0.15 * off[0.1]
