"""How near do baselines come to the true value, on simulated rewards?   python -m studies.basis_mse

Prompts with ``p ~ Beta(0.8, 0.9)`` under the reference policy, a table of 32 reference rollouts each, a policy that is
tilted by a common beta, one 0/1 reward a prompt. The group mean of 8 sees eight rewards a prompt. 100 batches a cell.
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines import Baseline, Basis, BatchMean
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from benchmarks.common import one_thread, save
from studies.runs import RESULTS

N_REFERENCE, REPEATS = 32, 100
VARIANTS: dict[str, dict[str, Any]] = {
    "basis unb": {},
    "basis vop": {"weighting": "vop"},
    "basis rvg": {"weighting": "rvg"},
    "basis unb, likelihood": {"calibration": "likelihood"},
    "basis unb, no smoothing (paper)": {"smoothing": 0.0},
    "basis unb, literal Eq. 6": {"smoothing": 0.0, "calibration": "literal"},
}


def simulate(beta: float | None, prompts: int, seed: int) -> tuple[Tensor, RolloutBatch, ValueTable, Tensor]:
    """True values ``(B,)``, a batch of one reward a prompt, the table, and the mean of 8 rewards ``(B,)``."""
    torch.manual_seed(seed)
    p = torch.distributions.Beta(0.8, 0.9).sample((prompts,)).double().clamp(1e-6, 1 - 1e-6)
    successes = torch.binomial(torch.full_like(p, N_REFERENCE), p)
    truth = torch.sigmoid(torch.logit(p) + (0.0 if beta is None else 1.0 / beta))
    ids = [str(i) for i in range(prompts)]
    rewards = {i: [1.0] * int(k) + [0.0] * (N_REFERENCE - int(k)) for i, k in zip(ids, successes, strict=True)}
    batch = RolloutBatch(
        rewards=torch.bernoulli(truth).float(),
        group_ids=torch.arange(prompts),
        prompt_ids=ids,
        action_mask=torch.ones((prompts, 1), dtype=torch.bool),
    )
    return truth, batch, ValueTable.from_rewards(rewards), torch.binomial(torch.full_like(truth, 8.0), truth) / 8


def cell(beta: float | None, prompts: int) -> dict[str, Any]:
    """Of one true beta (None: the policy of the table) and number of prompts: mean error of each baseline."""
    errors: dict[str, list[float]] = {name: [] for name in ["batch mean", "group mean of 8", *VARIANTS]}
    betas: list[float] = []
    for seed in range(REPEATS):
        truth, batch, table, group = simulate(beta, prompts, seed)
        estimators: dict[str, Baseline] = {"batch mean": BatchMean()}
        estimators |= {name: Basis(table, **params) for name, params in VARIANTS.items()}
        for name, estimator in estimators.items():
            result = estimator.advantages(batch)
            errors[name].append(float(((result.baseline - truth) ** 2).mean()))
            if name == "basis unb":
                betas.append(result.metrics["beta"])
        errors["group mean of 8"].append(float(((group - truth) ** 2).mean()))
    return {
        "mse": {k: mean(v) for k, v in errors.items()},
        "sd": {k: stdev(v) for k, v in errors.items()},
        "beta": betas,
    }


def main() -> None:
    """Measure, print and save."""
    one_thread()
    results = {}
    for prompts in (64, 512):
        for beta in (None, 1.0, 0.5, 0.3):
            key = f"B={prompts}, beta={'infinity' if beta is None else beta}"
            results[key] = cell(beta, prompts)
            mse, chosen = results[key]["mse"], sorted(results[key]["beta"])[REPEATS // 2]
            print(f"\n{key}   (median of the chosen beta: {chosen:.2f})")
            for name, value in mse.items():
                print(f"  {name:33} {value:.4f}   {value / mse['batch mean']:6.3f} of the batch mean")
    save("basis_mse", {"repeats": REPEATS, "results": results}, RESULTS)


if __name__ == "__main__":
    main()
