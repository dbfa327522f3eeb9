"""The policy's last layer on a CPU: log-probabilities of the tokens that are scored, a few tokens at a time.

Outside of Triton, TRL's own function projects every position, also prompts and padding, in tiles of 32,768 columns of
which it makes about ten temporary copies. Here a tile has a few tokens and all columns, so that no product is rounded
to bf16 before it is summed over tiles of columns.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor
from trl.trainer.utils import maybe_gather_lm_head_ctx

from basis_rl.run.seams import attributes

TILE_BYTES = 48 * 2**20
# With fewer rows, memory bandwidth would limit the matrix products.
LEAST_ROWS = 64
# Rows of a tile that are turned into probabilities at once.
BLOCK_ROWS = 16


def compact_head(device: torch.device) -> AbstractContextManager[None]:
    """Within it TRL's fused head scores labelled positions only. On a CPU `CompactHead` does so, on a GPU TRL
    itself."""
    if device.type != "cpu":
        return nullcontext()
    return attributes(trl_utils, _use_triton=lambda device: True, _ChunkedLogProbFunction=CompactHead)


class CompactHead(torch.autograd.Function):
    """What TRL's `ChunkedLogProbFunction` computes, with its arguments, for outputs among `log_probs`, `entropy` and
    `log_sum_sq_probs`: ``log p(target)``, the entropy and ``log sum_v p_v^2`` of ``softmax(f(hidden @ weight.T + b))``,
    N tokens, H hidden units, V tokens in the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> tuple[Tensor | None, ...]:
        # An output that nobody uses then has the gradient None instead of zeros to compute with.
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.transform = (logit_scale, softcap, 1.0 / temperature)
        squares = "log_sum_sq_probs" in outputs
        rows: list[tuple[Tensor, ...]] = []
        projection = _Projection(hidden, weight, bias, ctx.dtype)
        for begin, tile in projection.tiles():
            for block, place in _blocks(tile):
                logits = _transformed(_wide(block), *ctx.transform)
                log_z = logits.logsumexp(dim=-1)
                aims = targets[begin + place : begin + place + len(block), None]
                log_probs = logits.gather(1, aims)[:, 0] - log_z
                probs = (logits - log_z[:, None]).exp_()
                entropy = log_z - (probs * logits).sum(dim=-1)
                # Without squares, log_z stands in: all entries must be tensors.
                rows.append((log_probs, log_z, entropy, probs.square_().sum(dim=-1) if squares else log_z))
        none = _wide(hidden[:0, 0])
        log_probs, log_z, entropy, squared = map(torch.cat, zip(*rows, strict=True)) if rows else [none] * 4
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        log_squares = squared.log() if squares else None
        if log_squares is not None:
            ctx.mark_non_differentiable(log_squares)
        return log_probs, entropy if "entropy" in outputs else None, log_squares, None, None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_log_probs, of_entropy = grads[:2]
        hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = _wide(hidden[:0]).dtype
        with maybe_gather_lm_head_ctx(weight, bias):
            grad_hidden = torch.zeros_like(hidden, dtype=wide) if wants_hidden else None
            grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
            grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
            projection = _Projection(hidden, weight, bias, ctx.dtype)
            for begin, tile in projection.tiles():
                for block, place in _blocks(tile):
                    rows = slice(begin + place, begin + place + len(block))
                    stats = (targets[rows, None], log_z[rows, None], entropy[rows, None])
                    by_log_probs, by_entropy = (
                        None if grad is None else _wide(grad[rows, None]) for grad in (of_log_probs, of_entropy)
                    )
                    block.copy_(_logit_gradient(_wide(block), *stats, by_log_probs, by_entropy, ctx.transform))
                rows = slice(begin, begin + len(tile))
                if grad_hidden is not None:
                    grad_hidden[rows] = tile @ projection.weight
                if grad_weight is not None:
                    _add_product(grad_weight, tile.t(), projection.hidden[rows])
                if grad_bias is not None:
                    grad_bias += tile.sum(dim=0, dtype=wide)
        found = ((grad_hidden, hidden), (grad_weight, weight), (grad_bias, bias))
        return *(None if grad is None else grad.to(of.dtype) for grad, of in found), *[None] * 6


class _Projection:
    """``hidden @ weight.T + bias``, one tile of rows after another in the same memory."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.hidden = hidden.to(dtype)
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        most = max(LEAST_ROWS, TILE_BYTES // (weight.shape[0] * dtype.itemsize))
        self.memory = self.hidden.new_empty(min(len(hidden), most), weight.shape[0])

    def tiles(self) -> Any:
        """The place of a tile's first row, and the tile, which the caller may overwrite."""
        step = max(1, len(self.memory))
        for begin in range(0, len(self.hidden), step):
            rows = self.hidden[begin : begin + step]
            tile = self.memory[: len(rows)]
            torch.mm(rows, self.weight.t(), out=tile)
            if self.bias is not None:
                tile += self.bias
            yield begin, tile


def _wide(values: Tensor) -> Tensor:
    """A copy in float32, or in float64 if the values have that type."""
    return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32, copy=True)


def _blocks(tile: Tensor) -> Any:
    for begin in range(0, len(tile), BLOCK_ROWS):
        yield tile[begin : begin + BLOCK_ROWS], begin


def _transformed(logits: Tensor, scale: float, softcap: float | None, inverse_temperature: float) -> Tensor:
    """The logits as the model and the sampling temperature change them; `logits` is overwritten."""
    logits.mul_(scale)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits.mul_(inverse_temperature)


def _logit_gradient(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    of_log_probs: Tensor | None,
    of_entropy: Tensor | None,
    transform: tuple[float, float | None, float],
) -> Tensor:
    """``(n, V)`` gradient with respect to the projection, before scale and softcap; `logits` is overwritten.

    ``d log p_y / d z_j = [j = y] - p_j`` and ``d H / d z_j = -p_j (log p_j + H)``.
    """
    scale, softcap, inverse_temperature = transform
    z = _transformed(logits, *transform)
    slope: Tensor | float = scale * inverse_temperature
    if softcap is not None:
        slope = slope * (1.0 - (z / (inverse_temperature * softcap)).square_())
    log_p = z.sub_(log_z)
    p = log_p.exp()
    grad = torch.zeros_like(p) if of_entropy is None else log_p.add_(entropy).mul_(p).mul_(-of_entropy)
    if of_log_probs is not None:
        grad.addcmul_(p, of_log_probs, value=-1.0)
        grad.scatter_add_(1, targets, of_log_probs)
    return grad.mul_(slope)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``; a product in bf16 is rounded once before it is added, to be five times as fast."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
