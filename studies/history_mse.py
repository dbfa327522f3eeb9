"""Does history pay? A static table, history, batch mean and groups while a policy is trained.

    python -m studies.history_mse

4,000 prompts with ``p ~ Beta(0.8, 0.9)``, a table of 32 reference rollouts each, 240 steps of 512 prompts x 1 rollout.
All prompts share a tilt that grows to 2.5 logits; beside it each drifts by itself, to a standard deviation of d logits,
in one of three ways: ``sqrt`` (its own direction, growing like the square root of time), ``linear``, or a random
``walk``. The last three cases have 128 prompts x 4 rollouts a step.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines import Baseline, Basis, BasisHistory, BatchMean
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from benchmarks.common import one_thread, save
from studies.runs import RESULTS

PROMPTS, BATCH, STEPS, N_REFERENCE, EDGE = 4000, 512, 240, 32, 60
Drift = Callable[[Tensor, Tensor, int], Tensor]


def _sqrt(direction: Tensor, walked: Tensor, step: int) -> Tensor:
    return direction * ((step + 1) / STEPS) ** 0.5


def _linear(direction: Tensor, walked: Tensor, step: int) -> Tensor:
    return direction * ((step + 1) / STEPS)


def _walk(direction: Tensor, walked: Tensor, step: int) -> Tensor:
    return walked


DRIFTS: dict[str, Drift] = {"sqrt": _sqrt, "linear": _linear, "walk": _walk}


def simulate(drift: Drift, d: float, tilt: float, seed: int, rollouts: int = 1) -> dict[str, dict[str, float]]:
    """Mean squared error to the true value over the first and the last 60 steps, for each estimator."""
    torch.manual_seed(seed)
    p = torch.distributions.Beta(0.8, 0.9).sample((PROMPTS,)).double().clamp(1e-4, 1 - 1e-4)
    successes = torch.binomial(torch.full_like(p, N_REFERENCE), p).long().tolist()
    ids = [str(i) for i in range(PROMPTS)]
    table = ValueTable.from_rewards(
        {i: [1.0] * k + [0.0] * (N_REFERENCE - k) for i, k in zip(ids, successes, strict=True)}
    )
    estimators: dict[str, Baseline] = {
        "batch mean": BatchMean(),
        "basis": Basis(table),
        "basis, likelihood": Basis(table, calibration="likelihood"),
        "basis_history": BasisHistory(table),
        "basis_history, no table": BasisHistory(),
        "basis_history, drift 0.003": BasisHistory(table, drift=0.003),
        "basis_history, drift 0.003, no table": BasisHistory(drift=0.003),
    }
    errors: dict[str, list[float]] = {name: [] for name in [*estimators, "group mean of 8"]}
    direction, walked = d * torch.randn(PROMPTS).double(), torch.zeros(PROMPTS).double()
    order = torch.randperm(PROMPTS)
    for step in range(STEPS):
        walked = walked + d / STEPS**0.5 * torch.randn(PROMPTS).double()
        if len(order) < BATCH // rollouts:
            order = torch.randperm(PROMPTS)
        rows, order = order[: BATCH // rollouts].repeat_interleave(rollouts), order[BATCH // rollouts :]
        truth = torch.sigmoid(torch.logit(p) + tilt * (step + 1) / STEPS + drift(direction, walked, step))[rows]
        batch = RolloutBatch(
            rewards=torch.bernoulli(truth).float(),
            group_ids=torch.arange(BATCH) // rollouts,
            prompt_ids=[ids[row] for row in rows.tolist()],
            action_mask=torch.ones((BATCH, 1), dtype=torch.bool),
            step=step,
        )
        errors["group mean of 8"].append(float((truth * (1 - truth) / 8).mean()))  # its expectation, exactly
        for name, estimator in estimators.items():
            errors[name].append(float(((estimator.advantages(batch).baseline - truth) ** 2).mean()))
            estimator.update(batch)
    return {name: {"first": mean(e[:EDGE]), "last": mean(e[-EDGE:])} for name, e in errors.items()}


def main() -> None:
    """Measure, print and save."""
    one_thread()
    results: dict[str, Any] = {}
    cases = [("sqrt", 0.0, 0.0, 1), ("sqrt", 0.0, 2.5, 1), *((k, d, 2.5, 1) for k in DRIFTS for d in (0.5, 1.5))]
    cases += [("sqrt", 0.0, 2.5, 4), ("sqrt", 1.5, 2.5, 4), ("walk", 1.5, 2.5, 4)]
    for kind, d, tilt, rollouts in cases:
        key = f"drift {kind}, d = {d}, common tilt {tilt}" + (f", {rollouts} rollouts" if rollouts > 1 else "")
        runs = [simulate(DRIFTS[kind], d, tilt, seed, rollouts) for seed in range(3)]
        results[key] = runs
        print(f"\n{key}   (MSE over the first and the last {EDGE} steps; the last against the group mean of 8)")
        group = mean(run["group mean of 8"]["last"] for run in runs)
        for name in runs[0]:
            first, last = (mean(run[name][part] for run in runs) for part in ("first", "last"))
            print(f"  {name:36} {first:.4f}  {last:.4f}   {last / group:.2f}")
    save("history_mse", {"seeds": 3, "results": results}, RESULTS)


if __name__ == "__main__":
    main()
