"""The policy's last layer on a CPU: as plain autograd in float64, and as TRL's own function."""

import itertools

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

from basis_rl.trainer import head
from basis_rl.trainer.head import CompactHead

HIDDEN, VOCABULARY = 12, 75
ALL = ("log_probs", "entropy", "log_sum_sq_probs")
# (softcap, logit scale, temperature)
TRANSFORMS = [(None, 1.0, 1.0), (3.0, 1.0, 1.0), (None, 0.4, 1.0), (None, 1.0, 0.6), (2.0, 1.7, 1.3)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Rows enough for a tile are made of several blocks, and those of a test of several tiles."""
    monkeypatch.setattr(head, "TILE_BYTES", 1)
    monkeypatch.setattr(head, "LEAST_ROWS", 24)
    monkeypatch.setattr(head, "BLOCK_ROWS", 10)


def given(tokens, bias=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, HIDDEN), (VOCABULARY, HIDDEN), *([(VOCABULARY,)] if bias else [])]
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return leaves, targets


def plain(leaves, targets, softcap, scale, temperature):
    hidden, weight, *bias = leaves
    logits = torch.nn.functional.linear(hidden, weight, *bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    return log_probs, -(log_p.exp() * log_p).sum(-1), (2 * log_p).logsumexp(-1)


def fused(function, leaves, targets, softcap, scale, temperature, outputs=ALL):
    hidden, weight, *bias = leaves
    return function.apply(hidden, weight, bias[0] if bias else None, targets, temperature, 32, softcap, scale, outputs)[
        :3
    ]


def gradients(leaves, found, wanted):
    """Of a weighted sum of the outputs `wanted`, with other weights for each token."""
    weights = torch.linspace(-1, 2, len(found[0]), dtype=torch.float64)
    total = sum((value.double() * (weights + 0.3 * at)).sum() for at, value in enumerate(found[:2]) if at in wanted)
    return torch.autograd.grad(total, leaves)


def assert_equal(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=["log_probs", "entropy", "both"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("tokens", "bias"), [(1, True), (10, False), (77, True), (77, False)])
def test_it_is_plain_autograd(tokens, bias, transform, wanted):
    leaves, targets = given(tokens, bias)
    expected = plain(leaves, targets, *transform)
    found = fused(CompactHead, leaves, targets, *transform)
    assert_equal(found, expected, 1e-12)
    assert_equal(gradients(leaves, found, wanted), gradients(leaves, expected, wanted), 1e-11)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_is_trls_function(transform):
    leaves, targets = given(77, dtype=torch.float32)
    found, expected = (fused(each, leaves, targets, *transform) for each in (CompactHead, ChunkedLogProbFunction))
    assert_equal(found, expected, 2e-5)
    assert_equal(*(gradients(leaves, each, (0, 1)) for each in (found, expected)), 2e-4)
    assert not found[2].requires_grad


@pytest.mark.parametrize("outputs", [combined for size in (1, 2) for combined in itertools.combinations(ALL, size)])
def test_it_gives_what_is_asked_for(outputs):
    leaves, targets = given(30)
    expected = plain(leaves, targets, 2.0, 1.7, 1.3)
    found = fused(CompactHead, leaves, targets, 2.0, 1.7, 1.3, outputs)
    for name, ours, theirs in zip(ALL, found, expected, strict=True):
        if name in outputs or name == "log_probs":
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours is None


def test_no_token_gives_gradients_of_zero():
    leaves, targets = given(0)
    found = fused(CompactHead, leaves, targets, 2.0, 1.0, 1.0)
    assert [value.shape for value in found] == [(0,)] * 3
    for leaf, gradient in zip(leaves, gradients(leaves, found, (0, 1)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


def test_frozen_parts_get_no_gradient():
    leaves, targets = given(30)
    leaves[1].requires_grad_(False)
    expected = plain(leaves, targets, None, 1.0, 0.7)
    found = fused(CompactHead, leaves, targets, None, 1.0, 0.7)
    chosen = [leaves[0], leaves[2]]
    assert_equal(gradients(chosen, found, (0, 1)), gradients(chosen, expected, (0, 1)), 1e-11)


@pytest.mark.parametrize("autocast", [True, False])
def test_in_bf16_the_scores_are_those_of_rounded_logits_in_float32(autocast):
    leaves, targets = given(77, dtype=torch.float32 if autocast else torch.bfloat16)
    rounded = [leaf.detach().bfloat16().double().requires_grad_() for leaf in leaves]
    expected = plain(rounded, targets, None, 1.0, 0.7)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = fused(CompactHead, leaves, targets, None, 1.0, 0.7)
    assert {value.dtype for value in found} == {torch.float32}
    assert_equal([value.double() for value in found], expected, 6e-2)
    ours, theirs = (gradients(each, scores, (0, 1)) for each, scores in ((leaves, found), (rounded, expected)))
    for gradient, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        assert (gradient - other).norm() < 2e-2 * other.norm()
