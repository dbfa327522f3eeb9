"""How close are baselines to the true value, on simulated rewards?

    python -m studies.simulated_mse [--parts basis history field groups] [--quick]

The paper of BASIS claims that its error is far below that of the batch mean, and below that of a group mean of 8
(Sec. 5.1). In this simulation the true values are known: prompts have ``p ~ Beta(0.8, 0.9)`` under the reference
policy, a table with 32 reference rollouts per prompt, and rewards of 0 or 1.

- ``basis``: the policy is tilted by a common beta, as BASIS assumes. There is one reward per prompt and every variant
  of BASIS, with 100 batches for each case. The group mean of 8 sees eight rewards per prompt.
- ``history``: does it help to remember earlier rewards? 240 steps of 512 prompts x 1 rollout, out of 4,000 prompts. All
  prompts share a tilt that grows to 2.5 logits. In addition, each prompt drifts on its own, to a standard deviation of
  d logits, in one of three ways: ``sqrt`` (in its own direction, growing like the square root of time), ``linear``, or
  a random ``walk``. The last three cases have 128 prompts x 4 rollouts per step.
- ``field``: other published estimators compared with ours in the same simulation, with 512 rollouts per step for each:
  `basis_history` and `spo` (three rates of forgetting) with one rollout per prompt.
- ``groups``: the same with four and with eight: James-Stein, EBPO, the leave-one-out mean and the group's own mean,
  which includes the rollout's own reward.

Results: ``studies/results/basis_mse.json``, ``history_mse.json``, ``field_mse.json`` and ``groups_mse.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines import Baseline, Basis, BasisHistory, BatchMean, DrGrpo, Ebpo, JamesStein, Rloo, Spo
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from benchmarks.common import one_thread
from studies.runs import placed, save_table, study_parser

N_REFERENCE = 32
VARIANTS: dict[str, dict[str, Any]] = {
    "basis unb": {},
    "basis vop": {"weighting": "vop"},
    "basis rvg": {"weighting": "rvg"},
    "basis unb, likelihood": {"calibration": "likelihood"},
    "basis unb, no smoothing (paper)": {"smoothing": 0.0},
    "basis unb, literal Eq. 6": {"smoothing": 0.0, "calibration": "literal"},
}
Drift = Callable[[Tensor, Tensor, float], Tensor]
# By how many logits, (P,), each prompt has moved after a share of the run: from its direction and its random walk.
DRIFTS: dict[str, Drift] = {
    "sqrt": lambda direction, walked, share: direction * share**0.5,
    "linear": lambda direction, walked, share: direction * share,
    "walk": lambda direction, walked, share: walked,
}


@dataclass(frozen=True)
class Scale:
    """Size of the simulation.

    Attributes:
        repeats: batches for each case of ``basis``.
        sizes: prompts per batch of ``basis``.
        prompts: prompts of a run of ``history``, ``field`` or ``groups``.
        rollouts: rollouts per step of such a run.
        steps: steps of such a run.
        edge: number of steps at its beginning and at its end over which errors are averaged.
        seeds: runs for each case.
    """

    repeats: int = 100
    sizes: tuple[int, ...] = (64, 512)
    prompts: int = 4000
    rollouts: int = 512
    steps: int = 240
    edge: int = 60
    seeds: int = 3


QUICK = Scale(repeats=2, sizes=(8,), prompts=64, rollouts=32, steps=4, edge=2, seeds=1)


def reference(prompts: int, margin: float) -> tuple[Tensor, list[str], ValueTable]:
    """Success rates ``(P,)`` under the reference policy, in ``[margin, 1 - margin]``; the prompts' ids; their table."""
    p = torch.distributions.Beta(0.8, 0.9).sample((prompts,)).double().clamp(margin, 1 - margin)
    successes = torch.binomial(torch.full_like(p, N_REFERENCE), p).long().tolist()
    ids = [str(i) for i in range(prompts)]
    rewards = {i: [1.0] * k + [0.0] * (N_REFERENCE - k) for i, k in zip(ids, successes, strict=True)}
    return p, ids, ValueTable.from_rewards(rewards)


def rolled_out(truth: Tensor, prompt_ids: list[str], group: int = 1, step: int = 0) -> RolloutBatch:
    """A batch of 0/1 rewards with the true values `truth`, ``(N,)``; the rows of a group are adjacent."""
    return RolloutBatch(
        rewards=torch.bernoulli(truth).float(),
        group_ids=torch.arange(len(truth)) // group,
        prompt_ids=prompt_ids,
        action_mask=torch.ones((len(truth), 1), dtype=torch.bool),
        step=step,
    )


def run(
    values_at: Callable[[int], Tensor], prompts: int, steps: int, rollouts: int, group: int
) -> Iterator[tuple[Tensor, RolloutBatch]]:
    """The true values ``(N,)`` and the batch of each step of a simulated run. Every prompt occurs before any repeats.

    Args:
        values_at: function from a step to the values of all prompts, ``(P,)``.
        prompts: number of prompts; a prompt's id is its index.
        steps: number of steps.
        rollouts: rollouts per step.
        group: rollouts per prompt.
    """
    order = torch.randperm(prompts)
    for step in range(steps):
        values = values_at(step)
        if len(order) < rollouts // group:
            order = torch.randperm(prompts)
        rows, order = order[: rollouts // group].repeat_interleave(group), order[rollouts // group :]
        yield values[rows], rolled_out(values[rows], [str(row) for row in rows.tolist()], group, step)


def error(baseline: Tensor, truth: Tensor) -> float:
    """Mean squared error of ``(N,)`` baselines from the true values."""
    return float(((baseline - truth) ** 2).mean())


def cell(beta: float | None, prompts: int, repeats: int) -> dict[str, Any]:
    """Mean error of each baseline for one true beta (None: the policy is that of the table) and number of prompts."""
    errors: dict[str, list[float]] = {name: [] for name in ["batch mean", "group mean of 8", *VARIANTS]}
    betas: list[float] = []
    for seed in range(repeats):
        torch.manual_seed(seed)
        p, ids, table = reference(prompts, margin=1e-6)
        truth = torch.sigmoid(torch.logit(p) + (0.0 if beta is None else 1.0 / beta))
        batch, group = rolled_out(truth, ids), torch.binomial(torch.full_like(truth, 8.0), truth) / 8
        estimators: dict[str, Baseline] = {"batch mean": BatchMean()}
        estimators |= {name: Basis(table, **params) for name, params in VARIANTS.items()}
        for name, estimator in estimators.items():
            result = estimator.advantages(batch)
            errors[name].append(error(result.baseline, truth))
            if name == "basis unb":
                betas.append(result.metrics["beta"])
        errors["group mean of 8"].append(error(group, truth))
    return {
        "chosen beta": sorted(betas)[repeats // 2],  # the median
        "mse": {name: mean(found) for name, found in errors.items()},
        "sd": {name: stdev(found) for name, found in errors.items()},
    }


def basis(scale: Scale) -> list[dict[str, Any]]:
    """Run and print the part ``basis``; returns its rows."""
    rows = []
    for prompts in scale.sizes:
        for beta in (None, 1.0, 0.5, 0.3):
            found = cell(beta, prompts, scale.repeats)
            rows.append({"prompts": prompts, "beta": beta, **found})
            print(f"\nB = {prompts}, beta = {beta or 'infinity'}   (median of the chosen: {found['chosen beta']:.2f})")
            for name, value in found["mse"].items():
                print(f"  {name:33} {value:.4f}   {value / found['mse']['batch mean']:6.3f} of the batch mean")
    return rows


def of_history(table: ValueTable) -> dict[str, Baseline]:
    """The estimators of ``history``."""
    return {
        "batch mean": BatchMean(),
        "basis": Basis(table),
        "basis, likelihood": Basis(table, calibration="likelihood"),
        "basis_history": BasisHistory(table, belief="gaussian"),
        "basis_history, no table": BasisHistory(belief="gaussian", fixed_range=(0, 1)),
        "basis_history, drift 0.003": BasisHistory(table, drift=0.003, belief="gaussian"),
        "basis_history, drift 0.003, no table": BasisHistory(drift=0.003, belief="gaussian", fixed_range=(0, 1)),
    }


def of_field(table: ValueTable) -> dict[str, Baseline]:
    """The estimators of ``field``."""
    return {
        "batch mean": BatchMean(),
        "basis_history": BasisHistory(table),
        "basis_history, no table": BasisHistory(fixed_range=(0, 1)),
        "basis_history, gaussian": BasisHistory(table, belief="gaussian"),
        "basis_history, gaussian, no table": BasisHistory(belief="gaussian", fixed_range=(0, 1)),
        "spo": Spo(table, normalize=False),
        "spo, no table": Spo(normalize=False, fixed_range=(0, 1)),
        "spo, rho 0.875, no table": Spo(forgetting=0.875, normalize=False, fixed_range=(0, 1)),
        "spo, rho 0.96, no table": Spo(forgetting=0.96, normalize=False, fixed_range=(0, 1)),
    }


def of_groups(table: ValueTable) -> dict[str, Baseline]:
    """The estimators of ``groups``."""
    return {"group mean": DrGrpo(), "rloo": Rloo(), "james_stein": JamesStein(), "ebpo": Ebpo()}


def simulate(
    drift: Drift,
    d: float,
    tilt: float,
    seed: int,
    group: int = 1,
    scale: Scale | None = None,
    estimators_of: Callable[[ValueTable], dict[str, Baseline]] = of_history,
) -> dict[str, dict[str, float]]:
    """Mean squared error of each estimator from the true value, over the first and the last steps of a run.

    Args:
        drift: how each prompt moves on its own.
        d: standard deviation of this movement at the end of the run, in logits.
        tilt: common movement of all prompts at the end of the run, in logits.
        seed: seed of all random numbers.
        group: rollouts per prompt.
        scale: size of the simulation; by default that of the whole study.
        estimators_of: function that builds the compared estimators from the value table.
    """
    scale = scale or Scale()
    torch.manual_seed(seed)
    p, _, table = reference(scale.prompts, margin=1e-4)
    estimators = estimators_of(table)
    errors: dict[str, list[float]] = {name: [] for name in [*estimators, "group mean of 8"]}
    direction, walked = d * torch.randn(scale.prompts).double(), torch.zeros(scale.prompts).double()

    def values_at(step: int) -> Tensor:
        walked.add_(d / scale.steps**0.5 * torch.randn(scale.prompts).double())
        common = torch.logit(p) + tilt * (step + 1) / scale.steps
        return torch.sigmoid(common + drift(direction, walked, (step + 1) / scale.steps))

    for truth, batch in run(values_at, scale.prompts, scale.steps, scale.rollouts, group):
        errors["group mean of 8"].append(float((truth * (1 - truth) / 8).mean()))  # its expectation, exactly
        for name, estimator in estimators.items():
            errors[name].append(error(estimator.advantages(batch).baseline, truth))
            estimator.update(batch)
    return {name: {"first": mean(e[: scale.edge]), "last": mean(e[-scale.edge :])} for name, e in errors.items()}


def compared(
    scale: Scale,
    cases: Sequence[tuple[str, float, float, int]],
    of: Callable[[ValueTable], dict[str, Baseline]],
) -> list[dict[str, Any]]:
    """Run and print each case: drift, d, common tilt, rollouts per prompt; returns a row for each and estimator.

    A row has the error over the first and the last steps, by seed.
    """
    rows = []
    for drift, d, tilt, group in cases:
        runs = [simulate(DRIFTS[drift], d, tilt, seed, group, scale, of) for seed in range(scale.seeds)]
        print(f"\ndrift {drift}, d = {d}, common tilt {tilt}, {group} per prompt   (first and last {scale.edge} steps)")
        labels = {"drift": drift, "d": d, "tilt": tilt, "rollouts per prompt": group}
        for name in runs[0]:
            first, last = ([run[name][part] for run in runs] for part in ("first", "last"))
            rows.append({**labels, "estimator": name, "first": first, "last": last})
            print(f"  {name:36} {mean(first):.4f}  {mean(last):.4f}")
    return rows


def history(scale: Scale) -> list[dict[str, Any]]:
    """Run and print the part ``history``; returns its rows."""
    cases = [("sqrt", 0.0, 0.0, 1), ("sqrt", 0.0, 2.5, 1), *((k, d, 2.5, 1) for k in DRIFTS for d in (0.5, 1.5))]
    cases += [("sqrt", 0.0, 2.5, 4), ("sqrt", 1.5, 2.5, 4), ("walk", 1.5, 2.5, 4)]
    return compared(scale, cases, of_history)


DRIFTED = (("sqrt", 0.0, 2.5), ("sqrt", 1.5, 2.5), ("walk", 1.5, 2.5))


def field(scale: Scale) -> list[dict[str, Any]]:
    """Run and print the part ``field``; returns its rows."""
    return compared(scale, [(*case, 1) for case in DRIFTED], of_field)


def groups(scale: Scale) -> list[dict[str, Any]]:
    """Run and print the part ``groups``; returns its rows."""
    return compared(scale, [(*case, group) for case in DRIFTED for group in (4, 8)], of_groups)


PARTS = {"basis": basis, "history": history, "field": field, "groups": groups}


def main(argv: list[str] | None = None) -> None:
    """Simulate, print and save."""
    parser = study_parser(__doc__, "simulated_mse", PARTS)
    options = placed(parser.parse_args(argv))
    one_thread()
    for part in options.parts:
        scale = QUICK if options.quick else Scale()
        facts = {"batches": scale.repeats} if part == "basis" else {"seeds": scale.seeds}
        save_table(f"{part}_mse", facts, PARTS[part](scale), options.results)


if __name__ == "__main__":
    main()
