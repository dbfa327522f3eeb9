"""A policy with long, ragged rollouts: a two-layer transformer that walks on the digits; and its exact gradients.

A prompt is ``parity, start``. A rollout is a sequence of pairs ``step, state``, with a step of 1 to 4 and ``state <-
state + step mod 10``; it ends with END at a place that the policy chooses. It is right if every state is correct and
the last one has the parity. Steps are free choices, and states are determined, so there are tokens of high and of low
entropy, as in a chain of thought.

The symbols are the digits 0 to 9, 10 for END and 11 for padding. There are ``N`` rollouts of ``T`` tokens, ``D``
parameters and ``K`` weightings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from basis_rl.functional.energy import logit_gradient_energy

END, PAD, SYMBOLS, HEADS = 10, 11, 12, 2
Parameters = dict[str, Tensor]


def new_parameters(seed: int, length: int, width: int = 32, layers: int = 2) -> Parameters:
    """Random weights; `length` is the longest sequence, prompt included."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[0])

    weights = {"tokens": normal(SYMBOLS, width), "places": normal(length, width), "head": normal(width, SYMBOLS)}
    weights["before"] = normal(SYMBOLS, width)
    for layer in range(layers):
        weights |= {f"{layer}.in": normal(width, 3 * width), f"{layer}.out": normal(width, width)}
        weights |= {f"{layer}.up": normal(width, 4 * width), f"{layer}.down": normal(2 * width, width)}
    return weights


def logits(weights: Parameters, ids: Tensor) -> Tensor:
    """``(..., S) -> (..., S, V)``: pre-norm, causal attention, SwiGLU, and RMSNorm before an untied head.

    Each position also sees the previous token, so that a step can find the state that it starts from.
    """
    width = weights["tokens"].shape[1]
    before = torch.cat([torch.full_like(ids[..., :1], PAD), ids[..., :-1]], dim=-1)
    x = weights["tokens"][ids] + weights["before"][before] + weights["places"][: ids.shape[-1]]
    layer = 0
    while f"{layer}.in" in weights:
        q, k, v = (rms_norm(x, (width,)) @ weights[f"{layer}.in"]).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k, v = (part.transpose(-2, -3) for part in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        x = x + mixed @ weights[f"{layer}.out"]
        gate, value = (rms_norm(x, (width,)) @ weights[f"{layer}.up"]).chunk(2, dim=-1)
        x = x + (silu(gate) * value) @ weights[f"{layer}.down"]
        layer += 1
    return rms_norm(x, (width,)) @ weights["head"]


def new_prompts(generator: torch.Generator, count: int) -> Tensor:
    """``(count, 2)``: parity and start."""
    high = torch.tensor([2, 10])
    return (torch.rand(count, 2, generator=generator) * high).long()


def walks(generator: torch.Generator, count: int, length: int) -> Tensor:
    """``(count, 2 + length)`` supervised sequences; the chance to end is 3 % at states of the parity, 1 % at others."""
    ids = torch.full((count, 2 + length), PAD)
    ids[:, :2] = new_prompts(generator, count)
    state, running = ids[:, 1].clone(), torch.ones(count, dtype=torch.bool)
    for place in range(2, 1 + length, 2):
        end = torch.rand(count, generator=generator) < torch.where(state % 2 == ids[:, 0], 0.03, 0.01)
        ends, running = running & end & (place > 2), running & ~(end & (place > 2))
        ids[ends, place] = END
        step = torch.randint(1, 5, (count,), generator=generator)
        state = torch.where(running, (state + step) % 10, state)
        ids[running, place], ids[running, place + 1] = step[running], state[running]
    return ids


def supervise(weights: Parameters, seed: int, length: int, steps: int, batch: int = 24) -> Iterator[int]:
    """Train on `walks`, in place; yields after each step."""
    generator = torch.Generator().manual_seed(seed)
    for value in weights.values():
        value.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights.values(), lr=6e-3, weight_decay=0.01)
    for step in range(steps):
        ids = walks(generator, batch, length)
        loss = torch.nn.functional.cross_entropy(
            logits(weights, ids)[:, 1:-1].flatten(0, 1), ids[:, 2:].flatten(), ignore_index=PAD
        )
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 6e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        optimizer.step()
        yield step


@torch.no_grad()
def respond(weights: Parameters, prompts: Tensor, length: int, seed: int) -> Tensor:
    """``(N, 2) -> (N, 2 + length)``: rollouts sampled at temperature 1, with PAD after END.

    There is no KV cache: each token computes the attention again, but only for rows that have not ended.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(prompts), 2 + length), PAD)
    ids[:, :2] = prompts
    running = torch.arange(len(prompts))
    for place in range(2, 2 + length):
        last = torch.cat([logits(weights, rows)[:, -1] for rows in ids[running, :place].split(256)])
        last[:, PAD] = -torch.inf
        ids[running, place] = torch.multinomial(last.softmax(-1), 1, generator=generator)[:, 0]
        running = running[ids[running, place] != END]
        if not len(running):
            break
    return ids


def reward(ids: Tensor) -> Tensor:
    """``(N,)``: 1 if every state follows from the previous one and the last state has the parity, else 0."""
    rights = []
    for row in ids.tolist():
        parity, state, rollout = row[0], row[1], row[2:]
        end = rollout.index(END) if END in rollout else None
        right = end is not None and end % 2 == 0
        for step, then in zip(rollout[0:end:2], rollout[1:end:2], strict=False) if right else ():
            right, state = right and step < 5 and then == (state + step) % 10, then
        rights.append(float(right and state % 2 == parity))
    return torch.tensor(rights)


def action_mask(ids: Tensor) -> Tensor:
    """``(N, T)`` bool: the tokens of the rollouts, END included."""
    return ids[:, 2:] != PAD


def log_probs(weights: Parameters, ids: Tensor) -> Tensor:
    """``(..., 2 + T) -> (..., T)``: log-probability of each token, where PAD cannot be sampled; 0 on padding."""
    scores = logits(weights, ids)[..., 1:-1, :PAD].log_softmax(-1)
    rollout = ids[..., 2:]
    chosen = scores.gather(-1, rollout.clamp(max=PAD - 1)[..., None])[..., 0]
    return torch.where(rollout != PAD, chosen, 0.0)


@torch.no_grad()
def energies(weights: Parameters, ids: Tensor) -> Tensor:
    """``(N, T)``: ``w_t = 1 - 2 pi(y_t) + sum pi^2``, 0 on padding (OTB, Eq. 7)."""
    parts = []
    for rows in ids.split(64):
        probs = logits(weights, rows)[:, 1:-1, :PAD].softmax(-1)
        w = logit_gradient_energy(log_probs(weights, rows), probs.square().sum(-1))
        parts.append(torch.where(action_mask(rows), w, 0.0))
    return torch.cat(parts)


def gradients(weights: Parameters, ids: Tensor, weightings: Tensor, chunk: int = 8) -> Tensor:
    """``(N, K, D)`` float32: ``sum_t a_ikt d log pi(y_it) / d theta`` of each rollout, exactly.

    Args:
        weights: the parameters, D numbers in total.
        ids: prompts and rollouts, ``(N, 2 + T)``.
        weightings: the weights ``a``, ``(N, K, T)`` float32.
        chunk: number of rollouts that are processed at once.
    """
    fixed = {name: value.detach() for name, value in weights.items()}

    def one(row: Tensor, cotangents: Tensor) -> Tensor:
        _, pull = vjp(lambda w: log_probs(w, row), fixed)[:2]
        (grads,) = vmap(pull)(cotangents)
        return torch.cat([grads[name].flatten(1) for name in fixed], dim=1)

    order = action_mask(ids).sum(1).argsort()  # rollouts of similar length together, to compute less padding
    out = torch.zeros(len(ids), weightings.shape[1], sum(w.numel() for w in fixed.values()))
    for rows in order.split(chunk):
        longest = int(action_mask(ids[rows]).sum(1).max())
        out[rows] = vmap(one)(ids[rows, : 2 + longest], weightings[rows, :, :longest])
    return out
