"""What does choosing the prompts of one generation batch cost, by size of the dataset?

    python -m benchmarks.selection_cost [--prompts 1000000] [--batch 512] [--repeats 20] [--quick]

Measured on one core, with the belief of `basis_history` about every prompt. The prompt samplers take turns.

Results: ``benchmarks/results/selection_cost.json``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from basis_rl.baselines import BasisHistory
from basis_rl.samplers import SAMPLERS, build_sampler
from benchmarks.common import RESULTS, one_thread, save


def belief_about(prompt_ids: list[str]) -> BasisHistory:
    """A `basis_history` with a different belief about each prompt, as after a long run."""
    found = BasisHistory()
    generator = torch.Generator().manual_seed(0)
    shape = (len(found.drifts), len(prompt_ids))
    state = found.state_dict()
    state |= {
        "prompt_ids": prompt_ids,
        "mean": torch.randn(shape, generator=generator, dtype=torch.float64),
        "variance": torch.rand(shape, generator=generator, dtype=torch.float64),
        "last_seen": torch.zeros(len(prompt_ids), dtype=torch.float64),
        "shift_variance": 0.1,
    }
    found.load_state_dict(state)
    return found


def measure(prompts: int, batch: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds to draw prompts and look up their believed values: median, minimum and maximum."""
    ids = [f"{i:016x}" for i in range(prompts)]
    belief, samplers = belief_about(ids), {name: build_sampler(name) for name in SAMPLERS}
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for repeat in range(repeats):
        for name, sampler in samplers.items():
            generator = torch.Generator().manual_seed(repeat)
            began = time.perf_counter()
            draw = sampler.draw(ids, belief, batch, generator)
            belief.believed([ids[row] for row in draw.rows.tolist()])
            times[name].append(1e3 * (time.perf_counter() - began))
    return {
        name: {"median": float(np.median(each)), "least": min(each), "largest": max(each)}
        for name, each in times.items()
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    parser.add_argument("--prompts", type=int, nargs="+", default=sizes, help="sizes of the dataset (1000 to 1000000)")
    parser.add_argument("--batch", type=int, default=512, help="prompts per generation batch (512)")
    parser.add_argument("--repeats", type=int, default=20, help="draws per sampler and size (20)")
    parser.add_argument(
        "--quick", action="store_true", help="run for seconds only, to check that it works; its numbers mean nothing"
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.prompts, options.repeats = [1_000], 2
    one_thread()
    found = {str(count): measure(count, min(options.batch, count), options.repeats) for count in options.prompts}
    for count, row in found.items():
        print(count, {name: f"{each['median']:.1f} ms" for name, each in row.items()})
    results = {"batch": options.batch, "repeats": options.repeats, "milliseconds": found}
    save("selection_cost", results, Path(tempfile.mkdtemp()) if options.quick else RESULTS)
    return results


if __name__ == "__main__":
    main()
