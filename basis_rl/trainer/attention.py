"""Attention for packed rows: a model's own attention function, segment by segment or in one call for all of them.

A packed row is recognised by its attention mask. The segments of `basis_rl.functional.packing` travel in the mask's
place, as an int32 tensor ``(1, 1, S, 2 + 2 D)``, through every model that takes a mask of four dimensions as it is. The
functions that transformers has by name, and those of the policy's modeling file for ``eager``, are wrapped once; calls
with any other mask reach the original function, so generation and other models do not change.

Layers that carry a state along the row (linear attention, convolutions) get the rows of the packed row side by side,
padded on the right, which no token looks at: everything else of the model still runs on the packed row.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

varlen_attn: Callable[..., Any] | None = None
# torch before 2.10 lacks it.
with contextlib.suppress(ImportError):
    from torch.nn.attention.varlen import varlen_attn

Attention = Callable[..., tuple[Tensor, Tensor | None]]
SEGMENT_BY_SEGMENT = ("sdpa", "eager")
EAGER = "eager_attention_forward"
# What makes the mask of layers with a state, by its name in modeling files, and the types of these layers.
MASK_OF_STATES = "create_recurrent_attention_mask"
WITH_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# The segments' type where attention reads them, and where layers with a state do.
OF_ATTENTION = torch.int32
OF_STATES = torch.int64
# Segments with so few keys go through attention as one padded batch: more calls would cost more than its padding.
SHORT = 128


def attention_name(model: nn.Module) -> str:
    """The attention implementation of a model, as the user has set it."""
    config: Any = model.config
    return str(config.get_text_config()._attn_implementation)


def is_known(name: str) -> bool:
    """Whether packed rows can go through the attention of that name: flash attention's kernels take segments."""
    return name in SEGMENT_BY_SEGMENT or ("flash" in name and name in ALL_ATTENTION_FUNCTIONS)


def let_through_packed_rows(model: nn.Module) -> None:
    """Wrap the attention function that `model` uses; calls without segments do not change."""
    name = attention_name(model)
    if name != "eager":
        original = ALL_ATTENTION_FUNCTIONS[name]
        if not hasattr(original, "of_padded_rows"):
            ALL_ATTENTION_FUNCTIONS.register(name, _packed(original, name))
    else:
        # The eager function has no entry by name: each modeling file has its own.
        _wrap(model, EAGER, lambda original: _packed(original, name))
    if _wrap(model, MASK_OF_STATES, _mask_of_states):
        for kind in {type(module) for module in _mixers(model)}:
            if not hasattr(kind.forward, "of_padded_rows"):
                kind.forward = _rows_apart(kind.forward)


def types_of_rows_apart(model: nn.Module) -> set[str]:
    """Types of layers with a state for which `let_through_packed_rows` lays rows side by side."""
    return WITH_STATE if any(hasattr(file, MASK_OF_STATES) for file in _files(model)) else set()


def _files(model: nn.Module) -> list[Any]:
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    return [sys.modules[name] for name in names if name in sys.modules]


def _wrap(model: nn.Module, name: str, wrapper: Callable[[Any], Any]) -> bool:
    """Wrap, once, the function of that name in the modeling files of `model`; whether there is one."""
    files = [file for file in _files(model) if hasattr(file, name)]
    for file in files:
        original = getattr(file, name)
        if not hasattr(original, "of_padded_rows"):
            setattr(file, name, wrapper(original))
    return bool(files)


def _mixers(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that are given a mask: only in these do tokens meet."""
    masked = {m for m in model.modules() if "attention_mask" in inspect.signature(type(m).forward).parameters}
    return [m for m in masked if not any(part in masked for part in m.modules() if part is not m)]


def _mask_of_states(original: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    @functools.wraps(original)
    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        given = kwargs.get("attention_mask")
        if isinstance(given, Tensor) and given.dtype == OF_ATTENTION:
            return given.to(OF_STATES)
        return original(*args, **kwargs)

    mask.of_padded_rows = original  # type: ignore[attr-defined]
    return mask


def _rows_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a layer with a state, which sees each row of a packed row as a row."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if not (isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == OF_STATES):
            return original(*args, **kwargs)
        places, back = Layout.of(mask).once(_rows_of, mask.device)

        def rows(value: Any) -> Any:
            # The packed row's states; everything else has no tokens.
            of_tokens = isinstance(value, Tensor) and value.shape[:2] == (1, len(back))
            return value[0, places] if of_tokens else value

        kwargs = {name: rows(value) for name, value in kwargs.items()} | {"attention_mask": None}
        found = original(*map(rows, args), **kwargs)
        output = (found[0] if isinstance(found, tuple) else found).flatten(0, 1)[back][None]
        return (output, *found[1:]) if isinstance(found, tuple) else output

    forward.of_padded_rows = original  # type: ignore[attr-defined]
    return forward


def _rows_of(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """``(R, L)``: places of the packed row's R rows, padded on the right; ``(M,)``: a place of each token in them."""
    above = {(span.start, span.stop) for spans in layout.keys for span in spans[:-1]}
    paths = [spans for spans in layout.keys if (spans[-1].start, spans[-1].stop) not in above]
    rows = [[at for span in spans for at in range(span.start, span.stop)] for spans in paths]
    length = max(map(len, rows))
    places = torch.tensor([row + [row[-1]] * (length - len(row)) for row in rows], device=device)
    back = torch.empty(int(places.max()) + 1, dtype=torch.int64, device=device)
    for number, row in enumerate(rows):
        back[row] = torch.arange(len(row), device=device) + number * length
    return places, back


def _packed(original: Attention, name: str) -> Attention:
    @functools.wraps(original)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        # Masks of transformers are booleans or floating-point numbers.
        packed = isinstance(attention_mask, Tensor) and attention_mask.dtype == OF_ATTENTION
        if not packed:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        layout = Layout.of(attention_mask)
        # From position ids, flash attention would infer boundaries of its own.
        kwargs.pop("position_ids", None)
        if name not in SEGMENT_BY_SEGMENT:
            return original(module, query, *layout.gathered(key, value), None, *args, **kwargs, **layout.bounds(key))
        tensors = _as_cast(query, key, value)
        if name == "sdpa" and _has_varlen(*tensors) and not kwargs.get("dropout"):
            return _varlen(module, *tensors, layout, **kwargs), None
        attend = _as_batch if max(layout.lengths) <= SHORT else _by_segment
        return attend(original, name, module, query, key, value, layout, *args, **kwargs), None

    attention.of_padded_rows = original  # type: ignore[attr-defined]
    return attention


class Layout:
    """The segments of a packed row as the attention functions need them, made once for all layers.

    Attributes:
        queries: where each segment is in the packed row.
        keys: for each segment the path from the root of the prefix tree to itself, in the order of a rollout.
        lengths: tokens of each path.
    """

    def __init__(self, rows: list[list[int]]) -> None:
        self.queries = [slice(row[0], row[1]) for row in rows]
        # A row of `rows` has the segment itself first, then those above it, and zeros.
        self.keys = [
            [slice(*row[at : at + 2]) for at in (*range(2, len(row), 2), 0) if row[at] < row[at + 1]] for row in rows
        ]
        self.lengths = [sum(span.stop - span.start for span in spans) for spans in self.keys]
        self._made: dict[Any, Any] = {}

    @staticmethod
    def of(mask: Tensor) -> Layout:
        found: Layout | None = getattr(mask, "basis_layout", None)
        if found is None:
            # Kept with the tensor, which is the same for all layers, unless a wrapper has copied it.
            found = Layout(mask[0, 0].tolist())
            mask.basis_layout = found  # type: ignore[attr-defined]
        return found

    def once(self, make: Callable[..., Any], *kind: Any) -> Any:
        """``make(self, *kind)``, computed by the first layer that asks for it."""
        if (make, kind) not in self._made:
            self._made[make, kind] = make(self, *kind)
        return self._made[make, kind]

    def gathered(self, *tensors: Tensor) -> list[Tensor]:
        """``(1, heads, M, D)`` -> ``(1, heads, sum of each segment's keys, D)``."""
        return [tensor.index_select(2, self.once(_key_places, tensor.device)) for tensor in tensors]

    def bounds(self, like: Tensor) -> dict[str, Any]:
        """Where segments begin and end among queries and keys, by flash attention's names in transformers."""
        return self.once(_bounds, like.device)


def _key_places(layout: Layout, device: torch.device) -> Tensor:
    places = [at for spans in layout.keys for span in spans for at in range(span.start, span.stop)]
    return torch.tensor(places, device=device)


def _bounds(layout: Layout, device: torch.device) -> dict[str, Any]:
    spans = [query.stop - query.start for query in layout.queries]
    return {
        "cu_seq_lens_q": _running_sums(spans, device),
        "cu_seq_lens_k": _running_sums(layout.lengths, device),
        "max_length_q": max(spans),
        "max_length_k": max(layout.lengths),
    }


def _masks(layout: Layout, *kind: Any) -> list[Tensor | None]:
    """For each segment ``(1, 1, queries, keys)``; None where plain causal attention is right."""
    spans = [query.stop - query.start for query in layout.queries]
    return [_mask(queries, keys, *kind) for queries, keys in zip(spans, layout.lengths, strict=True)]


def _running_sums(lengths: list[int], device: torch.device) -> Tensor:
    sums = torch.tensor([0, *lengths]).cumsum(0)
    return sums.to(device=device, dtype=torch.int32)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """``(queries, keys)``: which keys a query sees, the last query all of them or as many as the window has."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return visible if window is None else visible.triu(keys - queries - window + 1)


def _for_attention(visible: Tensor, additive: torch.dtype | None) -> Tensor:
    """The mask as sdpa takes it, or as numbers of type `additive` for eager attention."""
    if additive is None:
        return visible
    return torch.zeros_like(visible, dtype=additive).masked_fill(~visible, torch.finfo(additive).min)


def _mask(
    queries: int, keys: int, window: int | None, additive: torch.dtype | None, device: torch.device
) -> Tensor | None:
    # Without a mask sdpa takes its fast causal path, which would be wrong where prefixes come before the queries.
    if additive is None and queries == keys and (window is None or keys <= window):
        return None
    return _for_attention(_visible(queries, keys, window, device), additive)[None, None]


class Batch(NamedTuple):
    """S segments as a batch: places in the packed row, ``(S * Q,)`` and ``(S * K,)``, 0 for padding; the mask
    ``(S, 1, Q, K)``; and which queries are no padding, ``(S, Q)``."""

    queries: Tensor
    keys: Tensor
    mask: Tensor
    real: Tensor


def _batch(layout: Layout, window: int | None, additive: torch.dtype | None, device: torch.device) -> Batch:
    queries = [list(range(span.start, span.stop)) for span in layout.queries]
    keys = [[at for span in spans for at in range(span.start, span.stop)] for spans in layout.keys]
    width = max(map(len, queries))
    depth = max(map(len, keys))
    visible = torch.zeros(len(queries), 1, width, depth, dtype=torch.bool, device=device)
    # Padding sees one token, or a softmax of nothing would be NaN.
    visible[..., 0] = True
    real = torch.zeros(len(queries), width, dtype=torch.bool, device=device)
    for row, (own, seen) in enumerate(zip(queries, keys, strict=True)):
        visible[row, 0, : len(own), : len(seen)] = _visible(len(own), len(seen), window, device)
        real[row, : len(own)] = True

    def padded(places: list[list[int]], size: int) -> Tensor:
        return torch.tensor([each + [0] * (size - len(each)) for each in places], device=device).flatten()

    return Batch(padded(queries, width), padded(keys, depth), _for_attention(visible, additive), real)


def _as_batch(
    original: Attention, name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, layout: Layout,
    *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    additive = query.dtype if name == "eager" else None
    batch: Batch = layout.once(_batch, _window(module, kwargs), additive, query.device)
    count = len(batch.real)

    def rows(tensor: Tensor, places: Tensor) -> Tensor:
        return tensor[0].index_select(1, places).unflatten(1, (count, -1)).transpose(0, 1)

    given = (rows(query, batch.queries), rows(key, batch.keys), rows(value, batch.keys))
    with _kernel_of_short_rows(query):
        found = original(module, *given, batch.mask, *args, **kwargs)[0]
    return found[batch.real][None]


def _kernel_of_short_rows(query: Tensor) -> contextlib.AbstractContextManager[None]:
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    # In 16 bits the backward pass of the CPU's fused kernel takes four times as long for rows of 40 tokens.
    if kind == "cpu" and dtype.itemsize == 2:
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


def _window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Tokens that a token sees, itself included; None without a sliding window."""
    return kwargs.get("sliding_window", getattr(module, "sliding_window", None))


def _by_segment(
    original: Attention, name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, layout: Layout,
    *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    additive = query.dtype if name == "eager" else None
    masks = layout.once(_masks, _window(module, kwargs), additive, query.device)
    found = []
    for span, spans, mask in zip(layout.queries, layout.keys, masks, strict=True):
        keys = _joined(key, spans)
        values = _joined(value, spans)
        found.append(original(module, query[:, :, span], keys, values, mask, *args, **kwargs)[0])
    return torch.cat(found, dim=1)


def _joined(tensor: Tensor, spans: list[slice]) -> Tensor:
    parts = [tensor[:, :, span] for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _as_cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As autocast would hand them to sdpa: rotary positions leave queries and keys in the residual stream's float32."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _has_varlen(query: Tensor, key: Tensor, value: Tensor) -> bool:
    # What the kernel takes: 16-bit tensors on a GPU, with heads of at most 256.
    half = query.dtype in (torch.bfloat16, torch.float16)
    return varlen_attn is not None and query.is_cuda and half and key.shape[-1] == value.shape[-1] <= 256


def _varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """All segments in one call of torch's kernel, causal from the bottom right as the keys outnumber the queries."""
    window = _window(module, kwargs)
    bounds = layout.bounds(key)
    rows = [tensor[0].transpose(0, 1) for tensor in (query, *layout.gathered(key, value))]
    places = [bounds[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")]
    # The kernel counts the tokens to the left; a window in transformers also counts the token itself.
    left = -1 if window is None else window - 1
    grouped = query.shape[1] != key.shape[1]
    assert varlen_attn is not None
    found: Tensor = varlen_attn(*rows, *places, scale=scaling, window_size=(left, 0), enable_gqa=grouped)
    return found[None]
