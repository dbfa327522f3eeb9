"""How far is the baseline of `basis_history` from the true value under rewards of other ranges?

    python -m benchmarks.reward_ranges [--quick]

400 prompts with known values, the chance p of a right answer drawn as ``sigmoid(N(0, 2^2))``; batches of 128 different
prompts with one rollout each. The error is the mean squared distance of the baseline to the true value over the last 40
of 120 batches, divided by that of the batch mean. Nothing tells the belief its range: it learns it. The rewards are

- ``0/1``, ``0.1 x 0/1``, ``-1/+1``: two values;
- ``0/1 + 0.5 format``: 0.5 more in eight of ten rollouts, right or wrong;
- ``0..10``: points, each of ten with chance p;
- ``0/1 less 0.5``: 0.5 less in every second rollout.

Results: ``benchmarks/results/reward_ranges.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines import Baseline, BasisHistory, BatchMean, Spo
from basis_rl.types import RolloutBatch
from benchmarks.common import one_thread, parser_of, save, spread

PROMPTS, SIZE, BATCHES, LAST, SEEDS = 400, 128, 120, 40, (0, 1, 2)
Sample = Callable[[Tensor, torch.Generator], Tensor]


def chance(p: Tensor | float, of: Tensor, generator: torch.Generator) -> Tensor:
    """0/1 draws with the chances `p`, as many as `of` has."""
    return (torch.rand(of.shape, generator=generator, dtype=torch.float64) < p).double()


# Of each kind of reward a sample, given the chances of a right answer, and its expectation as ``a + b p``.
REWARDS: dict[str, tuple[Sample, tuple[float, float]]] = {
    "0/1": (lambda p, g: chance(p, p, g), (0.0, 1.0)),
    "0.1 x 0/1": (lambda p, g: 0.1 * chance(p, p, g), (0.0, 0.1)),
    "-1/+1": (lambda p, g: 2 * chance(p, p, g) - 1, (-1.0, 2.0)),
    "0/1 + 0.5 format": (lambda p, g: chance(p, p, g) + 0.5 * chance(0.8, p, g), (0.4, 1.0)),
    "0..10": (lambda p, g: chance(p[:, None], p[:, None].expand(-1, 10), g).sum(dim=1), (0.0, 10.0)),
    "0/1 less 0.5": (lambda p, g: chance(p, p, g) - 0.5 * chance(0.5, p, g), (-0.25, 1.0)),
}
BASELINES: dict[str, Callable[[], Baseline]] = {
    "basis_history": lambda: BasisHistory(target="value"),
    "basis_history, gaussian": lambda: BasisHistory(belief="gaussian", target="value"),
    "spo": lambda: Spo(normalize=False),
}


def errors(kind: str, seed: int, batches: int) -> dict[str, float]:
    """Of each baseline the mean squared error over that of the batch mean."""
    sample, (offset, factor) = REWARDS[kind]
    generator = torch.Generator().manual_seed(seed)
    p = torch.sigmoid(2 * torch.randn(PROMPTS, generator=generator, dtype=torch.float64))
    baselines = {"batch_mean": BatchMean(), **{name: make() for name, make in BASELINES.items()}}
    squares = dict.fromkeys(baselines, 0.0)
    for step in range(batches):
        rows = torch.randperm(PROMPTS, generator=generator)[:SIZE]
        batch = RolloutBatch(
            rewards=sample(p[rows], generator).float(),
            group_ids=torch.arange(SIZE),
            prompt_ids=[f"p{row}" for row in rows.tolist()],
            action_mask=torch.ones((SIZE, 1), dtype=torch.bool),
            step=step,
        )
        for name, baseline in baselines.items():
            if step >= batches - LAST:
                off = baseline.advantages(batch).baseline.double() - (offset + factor * p[rows])
                squares[name] += float(off.square().sum())
            baseline.update(batch)
    return {name: squares[name] / squares["batch_mean"] for name in BASELINES}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    quick = parser_of(__doc__).parse_args(argv).quick
    one_thread()
    results: dict[str, Any] = {}
    for kind in REWARDS:
        runs = [errors(kind, seed, LAST + 2 if quick else BATCHES) for seed in (SEEDS[:1] if quick else SEEDS)]
        results[kind] = {name: spread([run[name] for run in runs]) for name in BASELINES}
        shown = ", ".join(f"{name} {row['median']:.3f}" for name, row in results[kind].items())
        print(f"{kind:18} {shown}")
    if not quick:
        save("reward_ranges", {"prompts": PROMPTS, "batch": SIZE, "batches": BATCHES, "last": LAST, "errors": results})
    return results


if __name__ == "__main__":
    main()
