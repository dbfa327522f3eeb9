"""Does `least_variance` give less gradient variance than no baseline, the batch mean and the value?

    python -m studies.least_variance [MODEL ...] [--selection] [--quick]

Measured is the power of a rollout's gradient, ``E[(r - b)^2 |S|^2]`` with its score S, as a share of the power without
a baseline. Of two unbiased baselines, the one with less power has less variance, by the same amount.

- Softmax policies, one for each prompt, whose possible rollouts are right or wrong. Here ``|S|^2 = 1 - 2 pi(y) + sum
  pi^2`` is exact, and equal to the energy. The cases differ in how easy the prompts are, and in how many possible
  rollouts are right and wrong: if the probability of one kind is spread over many rollouts, their scores are larger.
- Models, if given: those of `studies.score_norms`, with norms over all their parameters, while `least_variance` sees
  only the energies. With ``--selection`` they are policies of the selection study's task, such as those that
  ``python -m studies.value.study --selection`` leaves in ``runs/value_study``, and there are no softmax policies.

Batches have 64 or 256 rollouts, one per prompt; the value table has 32 rollouts per prompt of the same policy. ``best``
is each prompt's own ``b*``, which is not known in practice.

Results: ``studies/results/least_variance.json``, with ``--selection`` ``least_variance_selection.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from basis_rl.baselines import Baseline, Basis, BasisHistory, BatchMean, LeastVariance, NoBaseline
from basis_rl.data import load_prompts
from basis_rl.recipe.file import parse_recipe
from basis_rl.rewards import MathVerifyReward
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from benchmarks.common import one_thread, save
from studies import worked_sums
from studies.runs import placed, rounded, study_parser
from studies.score_norms import drawn_answers
from studies.selection import task
from studies.training import RECIPE

REFERENCE = 32
SIMPLE = ("none", "batch_mean", "basis", "basis_history")


@dataclass(frozen=True)
class Case:
    """Prompts with values from ``Beta(a, b)``; `right` right and `wrong` wrong rollouts, equally likely by kind."""

    a: float
    b: float
    right: int
    wrong: int


CASES = {
    "two answers": Case(0.8, 0.9, 1, 1),
    "two answers, mostly right": Case(4.0, 1.0, 1, 1),
    "one right, 20 wrong": Case(0.8, 0.9, 1, 20),
    "one right, 20 wrong, mostly wrong": Case(1.0, 6.0, 1, 20),
    "20 right, one wrong": Case(0.8, 0.9, 20, 1),
    "20 right, 20 wrong": Case(0.8, 0.9, 20, 20),
    "20 right, 20 wrong, mostly right": Case(4.0, 1.0, 20, 20),
}


def norms(case: Case, value: Tensor) -> tuple[Tensor, Tensor]:
    """``|S|^2`` of a right and of a wrong rollout, ``(P,)`` each: ``1 - 2 pi(y) + sum pi^2``."""
    right, wrong = value / case.right, (1 - value) / case.wrong
    squares = case.right * right**2 + case.wrong * wrong**2
    return 1 - 2 * right + squares, 1 - 2 * wrong + squares


def estimators(table: ValueTable) -> dict[str, Baseline]:
    """The baselines that are compared."""
    found = (NoBaseline(), BatchMean(), Basis(table), BasisHistory(table, belief="gaussian"), LeastVariance(table))
    return dict(zip((*SIMPLE, "least_variance"), found, strict=True))


def batch_of(rewards: Tensor, energies: Tensor, rows: Tensor) -> RolloutBatch:
    """One rollout of each of the prompts `rows`, its energy on one token."""
    return RolloutBatch(
        rewards=rewards.float(),
        group_ids=torch.arange(len(rows)),
        prompt_ids=[str(row) for row in rows.tolist()],
        action_mask=torch.ones((len(rows), 1), dtype=torch.bool),
        energies=energies.float()[:, None],
    )


def power(baseline: Tensor, rewards: Tensor, weights: Tensor) -> float:
    """``mean (r - b)^2 |S|^2``."""
    return float((weights * (rewards - baseline) ** 2).mean())


def simulated(case: Case, size: int, batches: int) -> dict[str, float]:
    """Mean power with each baseline as a share of that without one, in batches of `size` prompts."""
    torch.manual_seed(0)
    value = torch.distributions.Beta(case.a, case.b).sample((1000,)).double().clamp(1e-3, 1 - 1e-3)
    table = table_of(torch.binomial(torch.full_like(value, REFERENCE), value).long())
    right, wrong = norms(case, value)
    best = value * right / (value * right + (1 - value) * wrong)
    powers: dict[str, list[float]] = {name: [] for name in (*SIMPLE, "least_variance", "best")}
    for _ in range(batches):
        rows = torch.randperm(len(value))[:size]
        rewards = torch.bernoulli(value[rows])
        weights = torch.where(rewards > 0, right[rows], wrong[rows])
        batch = batch_of(rewards, weights, rows)
        for name, estimator in estimators(table).items():
            powers[name].append(power(estimator.advantages(batch).baseline, rewards, weights))
        powers["best"].append(power(best[rows], rewards, weights))
    return shares(powers)


def shares(powers: dict[str, list[float]]) -> dict[str, float]:
    """Means over the batches, as shares of the mean without a baseline."""
    return {name: mean(found) / mean(powers["none"]) for name, found in powers.items()}


def table_of(successes: Tensor) -> ValueTable:
    """A value table with `REFERENCE` rollouts per prompt, of which `successes` ``(P,)`` were right."""
    counts = enumerate(successes.tolist())
    return ValueTable.from_rewards({str(i): [1.0] * k + [0.0] * (REFERENCE - k) for i, k in counts})


def of_model(
    folder: Path, problems: Any, samples: int, batches: int, reward: Any, tokens: int
) -> tuple[dict[str, float], float]:
    """The same for a model, and its mean reward: of each problem's rollouts half make the batches, half the table."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    rewards, found, energies, _ = drawn_answers(model, tokenizer, problems, samples, tokens, reward)
    if not 0 < float(rewards.mean()) < 1:
        raise ValueError(f"All rollouts of {folder} get the same reward. Use another model, or more --problems.")
    half = samples // 2
    table = ValueTable.from_rewards({str(i): row.tolist() for i, row in enumerate(rewards[:, half:])})
    powers: dict[str, list[float]] = {name: [] for name in (*SIMPLE, "least_variance")}
    torch.manual_seed(0)
    rows = torch.arange(len(rewards))
    for _ in range(batches):
        which = torch.randint(half, (len(rows),))
        batch = batch_of(rewards[rows, which], energies[rows, which], rows)
        for name, estimator in estimators(table).items():
            baseline = estimator.advantages(batch).baseline
            powers[name].append(power(baseline, rewards[rows, which].double(), found[rows, which].double()))
    return shares(powers), float(rewards.mean())


def of_quickstart() -> tuple[Any, Any, int]:
    """The quickstart's held-out problems, their reward, and how long a rollout may be."""
    problems = load_prompts(parse_recipe([RECIPE]).data, conversational=True, held_out=True)
    return problems, MathVerifyReward(num_workers=1), worked_sums.TOKENS


def of_selection() -> tuple[Any, Any, int]:
    """The same for the selection study's task, with its training prompts, as its held-out ones are all solvable."""
    return task.datasets(task.TASKS["mixed"], 1024, 0)[0], task.reward, task.TOKENS


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Run the study; returns the shares by case."""
    parser = study_parser(__doc__, "least_variance")
    parser.add_argument("folders", nargs="*", type=Path, help="folders of models")
    parser.add_argument("--problems", type=int, default=100, help="number of problems for the models (100)")
    parser.add_argument("--samples", type=int, default=16, help="rollouts per problem for the models (16)")
    parser.add_argument("--selection", action="store_true", help="the models are policies of the selection study")
    options = placed(parser.parse_args(argv))
    if options.selection and not options.folders:
        parser.error("--selection needs folders of models.")
    if options.selection:
        options.study = "least_variance_selection"
    one_thread()
    batches = 3 if options.quick else 100
    found: dict[str, dict[str, float]] = {}
    for name, case in {} if options.selection else CASES.items():
        for size in (64, 256):
            found[f"{name}, {size} rollouts"] = simulated(case, size, batches)
    rewards = {}
    if options.folders:
        problems, reward, tokens = of_selection() if options.selection else of_quickstart()
        problems = problems.shuffle(seed=0).select(range(options.problems))
        for folder in options.folders:
            policy = f"{folder.parent.name}/{folder.name}"
            found[policy], rewards[policy] = of_model(folder, problems, options.samples, batches, reward, tokens)
    for name, row in found.items():
        least = min(row[each] for each in SIMPLE)
        told = ", ".join(f"{key} {x:.3f}" for key, x in row.items())
        print(f"{name}: {told}; against the best of the others {row['least_variance'] / least:.3f}", flush=True)
    raw: dict[str, Any] = {"batches": batches, "power, as a share of none": found, "mean reward": rewards}
    save(options.study, rounded(raw), options.results)
    return found


if __name__ == "__main__":
    main()
