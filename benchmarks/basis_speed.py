"""What does BASIS cost a step, and how does it grow?   python -m benchmarks.basis_speed

One core; 512 and 65,536 rollouts alternate; peak memory is that of the tensors allocated, by torch's profiler.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch

from basis_rl.baselines import Basis
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from benchmarks.common import one_thread, peak_bytes, save

SIZES = {512: 61, 4096: 21, 65_536: 7}


def case(n: int) -> tuple[Basis, RolloutBatch]:
    """BASIS and a batch of n prompts with one rollout each."""
    generator = torch.Generator().manual_seed(n)
    successes = torch.randint(0, 33, (n,), generator=generator).tolist()
    ids = [str(i) for i in range(n)]
    table = ValueTable.from_rewards({i: [1.0] * k + [0.0] * (32 - k) for i, k in zip(ids, successes, strict=True)})
    batch = RolloutBatch(
        rewards=torch.randint(0, 2, (n,), generator=generator).float(),
        group_ids=torch.arange(n),
        prompt_ids=ids,
        action_mask=torch.ones((n, 1), dtype=torch.bool),
    )
    return Basis(table), batch


def main() -> None:
    """Measure, print and save."""
    one_thread()
    cases = {n: case(n) for n in SIZES}
    seconds: dict[int, list[float]] = {n: [] for n in SIZES}
    for basis, batch in cases.values():
        basis.advantages(batch)
    for round_ in range(max(SIZES.values())):
        for n, (basis, batch) in cases.items():
            if round_ < SIZES[n]:
                began = time.perf_counter()
                basis.advantages(batch)
                seconds[n].append(time.perf_counter() - began)
    results: dict[str, Any] = {}
    base = median(seconds[512])
    for n, times in seconds.items():
        ordered = sorted(times)
        basis, batch = cases[n]
        peak = peak_bytes(partial(basis.advantages, batch))
        spread = [ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]]
        results[str(n)] = {"seconds": times, "median": median(times), "spread": spread, "peak_bytes": peak}
        print(
            f"{n:6} rollouts x 230 betas: {1e3 * median(times):8.2f} ms (10 to 90 %: {1e3 * spread[0]:.2f} to "
            f"{1e3 * spread[1]:.2f}), {median(times) / base:6.1f} x 512's, peak {peak / n:.0f} bytes a rollout"
        )
    save("basis_speed", {"results": results})


if __name__ == "__main__":
    main()
