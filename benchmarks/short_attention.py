"""How fast is torch's attention on a CPU for short rows: its fused kernel, or products of matrices?

    python -m benchmarks.short_attention [--quick]

Scoring without padding asks for attention of many short segments (`basis_rl.trainer.attention`). One thread; forward
and backward of both kernels in turn, processor time, medians of the rounds. Nothing is stored.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import one_thread, parser_of

# Segments, queries and keys of each; the first is a micro-batch of the clock study.
SHAPES = ((65, 34, 40), (32, 100, 128), (8, 200, 300))
KERNELS = {"fused": SDPBackend.FLASH_ATTENTION, "products": SDPBackend.MATH}
HEADS, SIZE = 9, 64


def milliseconds(kernel: SDPBackend, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[float, float]:
    """Of a forward and a backward pass."""
    rows, queries, keys = shape
    query, key, value = (
        torch.randn(rows, HEADS, n, SIZE, dtype=dtype, requires_grad=True) for n in (queries, keys, keys)
    )
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    with sdpa_kernel(kernel):
        began = time.process_time()
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        middle = time.process_time()
    found.backward(torch.ones_like(found))
    return 1e3 * (middle - began), 1e3 * (time.process_time() - middle)


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Print the table; returns the medians, forward and backward, of each line."""
    options = parser_of(__doc__).parse_args(argv)
    one_thread()
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES[:1] if options.quick else SHAPES:
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in KERNELS}
            for _ in range(2 if options.quick else 7):
                for name, kernel in KERNELS.items():
                    times[name].append(milliseconds(kernel, shape, dtype))
            for name, each in times.items():
                line = f"{str(dtype).removeprefix('torch.')} {shape} {name}"
                found[line] = [median(values) for values in zip(*each, strict=True)]
                print(f"{line}: {found[line][0]:.1f} ms forward, {found[line][1]:.1f} ms backward", flush=True)
    return found


if __name__ == "__main__":
    main()
