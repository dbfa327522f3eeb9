"""Reference functions in place of attention kernels that only a GPU has, with the contracts that these document."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def attention_of_segments(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, scale: float | None, left: int
) -> Tensor:
    """``(T, heads, D)``: each segment by itself, causal from the bottom right, with `left` earlier keys (-1: all)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    found = []
    for queries, keys in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True):
        rows = [part.repeat_interleave(groups, dim=1).to(wide) for part in (key[slice(*keys)], value[slice(*keys)])]
        scores = torch.einsum("qhd,khd->hqk", query[slice(*queries)].to(wide), rows[0]) * scale
        # The last query is at the place of the last key.
        place = torch.arange(scores.shape[1], device=query.device)[:, None] + scores.shape[2] - scores.shape[1]
        behind = place - torch.arange(scores.shape[2], device=query.device)
        seen = (behind >= 0) & ((behind <= left) | (left < 0))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, rows[1]).to(query.dtype))
    return torch.cat(found)


def check_segments(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int,
    types: tuple[torch.dtype, ...] = HALF,
) -> None:  # fmt: skip
    """What kernels for variable lengths require of their tensors, and read past the end of memory without."""
    assert query.dtype in types
    assert query.dtype == key.dtype == value.dtype
    assert query.ndim == key.ndim == value.ndim == 3, "(tokens, heads, dim)"
    assert key.shape == value.shape
    assert query.shape[2] == key.shape[2] <= 256
    assert query.shape[1] % key.shape[1] == 0
    assert all(each.stride(-1) == 1 for each in (query, key, value)), "the last dimension is contiguous"
    assert len({each.device for each in (query, key, value, ends_q, ends_k)}) == 1
    for ends, longest, tokens in ((ends_q, max_q, len(query)), (ends_k, max_k, len(key))):
        assert ends.dtype == torch.int32
        assert ends.ndim == 1
        assert ends.is_contiguous()
        assert type(longest) is int
        lengths = ends.diff()
        assert int(ends[0]) == 0
        assert int(ends[-1]) == tokens
        assert int(lengths.min()) > 0
        assert int(lengths.max()) == longest
    assert len(ends_q) == len(ends_k)


class Varlen:
    """In place of ``torch.nn.attention.varlen.varlen_attn``, whose signature every call has to fit.

    With other `types` than the kernel's, results can be compared to the last digits.
    """

    def __init__(self, kernel: Callable[..., Any], types: tuple[torch.dtype, ...] = HALF) -> None:
        self.signature = inspect.signature(kernel)
        self.types, self.calls = types, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        names = ("query", "key", "value", "cu_seq_q", "cu_seq_k")
        tensors = [given[name] for name in names]
        check_segments(*tensors, given["max_q"], given["max_k"], self.types)
        assert given["scale"] is None or type(given["scale"]) is float
        left, right = given["window_size"]
        assert (type(left), right) == (int, 0)
        assert left >= -1
        assert given["enable_gqa"] or tensors[0].shape[1] == tensors[1].shape[1]
        others = ("return_aux", "seqused_k", "block_table", "num_splits")
        assert all(given.get(name) is None for name in others)
        self.calls += 1
        return attention_of_segments(*tensors, given["scale"], left)


class Flash:
    """In place of ``flash_attn.flash_attn_varlen_func``, with version 2's parameters."""

    def __init__(self) -> None:
        self.calls = 0

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        check_segments(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert causal
        assert (dropout_p, softcap) == (0.0, 0.0)
        self.calls += 1
        return attention_of_segments(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size[0])

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, *args: Any, softmax_scale: float | None = None, **_: Any
    ) -> Tensor:
        """For rows of one length, ``(B, L, heads, dim)``: of a packed row its tokens would see those of all rows."""
        assert q.shape[:2] == k.shape[:2] == (1, q.shape[1]), "only rows by themselves, by which a model is asked"
        if q.dtype not in HALF:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        ends = torch.tensor([0, q.shape[1]], device=q.device)
        return attention_of_segments(q[0], k[0], v[0], ends, ends, softmax_scale, -1)[None]
