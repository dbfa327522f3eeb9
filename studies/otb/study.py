"""How much variance of the mean gradient remains with group baselines and token baselines, measured exactly?

    python -m studies.otb.study [--seeds 0 1] [--quick]

The OTB paper (Secs. 5.3, 6.3, 6.4, Figs. 11 and 12) derives its token baseline as the one with the least variance, and
shows a lower variance than with the others. This study checks it at small scale. A two-layer transformer
(`studies.otb.chain_policy`), early and late in a supervised phase, samples 192 rollouts of up to 256 tokens, of varying
length, for each of four prompts. The gradient of every rollout with respect to all parameters is exact. So are, for
groups of 4, 8, 16 and 32, the group's mean gradient and its variance over the groups under each baseline. The study
also asks whether the energy ``w = 1 - 2 pi(y) + sum pi^2``, which OTB uses in place of the squared norm of a token's
gradient, is proportional to it: for each token, and cumulated over the rollout. Since OTB compares a cumulated energy
only with others at the same position, the correlation within positions is given as well.

A ratio of two variances comes with a 95 % bootstrap interval: the groups of each prompt are resampled, the same ones
for both estimators. The interval covers other groups of this policy for these prompts, not other prompts or policies.
The groups of each size are the same rollouts split in order, so different group sizes do not confirm each other; and
there are only 6 groups of 32 per prompt. With normally distributed gradients such an interval contains the true ratio
in about 95 % of cases, as a test shows for 6 groups per prompt. If the groups contribute as unequally as here, it does
so in fewer cases.

Results: ``studies/results/otb_study.json`` and ``.png``. Runs are stored in ``runs/otb_study``.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import one_thread, save
from studies import drawing
from studies.otb import analysis as oa
from studies.otb import chain_policy as policy
from studies.runs import Planned, kept_runs, placed, rounded, study_parser

TRUE_NORMS = "ogb, true norms"
RIVALS = ("isolated energy", "opo, token", "opo", "ogb", TRUE_NORMS)  # of otb
SCATTERED = ("token, all parameters", "cumulated, |sum of s_j|^2")


@dataclass(frozen=True)
class Plan:
    """Size of the study. `length` is the maximum number of tokens of a rollout; `groups` are the group sizes."""

    seeds: tuple[int, ...] = (0, 1)
    stages: tuple[int, ...] = (150, 500)  # supervised steps of the early and of the late policy
    length: int = 256
    prompts: int = 4
    responses: int = 192  # rollouts of each prompt
    groups: tuple[int, ...] = (4, 8, 16, 32)
    looked_at: int = 16  # rollouts for which the gradient of each token is computed
    resamples: int = 10_000  # of the groups, for the intervals


QUICK = Plan(seeds=(0,), stages=(3, 5), length=24, prompts=2, responses=16, groups=(4, 8), looked_at=3, resamples=100)


def variances(
    weights: policy.Parameters, ids: Tensor, plan: Plan
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Tensor]], dict[str, Any]]:
    """Results from the rollouts of one prompt.

    Returns:
        By group size and baseline: the moments, and the groups' deviations ``(K, K)``. And facts about the rollouts:
        reward, length, energy, and their correlations with each other and with the squared norms.
    """
    mask, rewards, energies = policy.action_mask(ids), policy.reward(ids), policy.energies(weights, ids)
    token: dict[tuple[int, str], Tensor] = {}
    plain: dict[tuple[int, str], Tensor] = {}
    for n in plan.groups:
        for name, baseline in oa.BASELINES.items():
            values = oa.advantages(baseline, rewards, mask, energies, n)
            (token if values.ndim == 2 else plain)[n, name] = values
    ones = torch.ones_like(energies)[:, None]
    weightings = torch.cat([ones, *(values[:, None] for values in token.values())], dim=1) * mask[:, None]
    exact = policy.gradients(weights, ids, weightings)
    scores, of_tokens = exact[:, 0], dict(zip(token, exact[:, 1:].unbind(1), strict=True))
    norms = scores.double().square().sum(1)
    found: dict[int, dict[str, Any]] = {}
    products: dict[int, dict[str, Tensor]] = {}
    for n in plan.groups:
        estimates = {name: oa.group_means(values[:, None] * scores, n) for (k, name), values in plain.items() if k == n}
        estimates |= {name: oa.group_means(grads, n) for (k, name), grads in of_tokens.items() if k == n}
        true = oa.true_norm_advantages(rewards, norms, n)
        estimates[TRUE_NORMS] = oa.group_means(true[:, None] * scores, n)
        found[n] = {name: oa.moments(means, estimates["rloo"]) for name, means in estimates.items()}
        products[n] = {name: oa.deviations(means) for name, means in estimates.items()}
    total, lengths, n = energies.sum(1), mask.sum(1).float(), max(plan.groups)
    shape = {
        "reward": float(rewards.mean()),
        "length": float(lengths.mean()),
        "sd of length": float(lengths.std()),
        "truncated": float((ids[:, -1] != policy.PAD).logical_and(ids[:, -1] != policy.END).float().mean()),
        "energy a token": float(total.sum() / lengths.sum()),
        "reward and length": oa.correlation(rewards, lengths),
        "total energy and |S|^2": oa.correlation(total, norms),
        "length and |S|^2": oa.correlation(lengths, norms),
        "total energy and length, in groups": oa.within_groups(total, lengths, n),
        "energy a token and length, in groups": oa.within_groups(total / lengths, lengths, n),
    }
    return found, products, shape


def intervals(by_prompt: list[dict[str, Tensor]], count: int, seed: int) -> dict[str, list[float]]:
    """The intervals of ``"a / b"`` at one group size: each estimator over the group mean, and OTB over its rivals.

    Args:
        by_prompt: for each prompt, `oa.deviations` of each estimator.
        count: number of resamples.
        seed: seed of the resamples.
    """
    names = list(by_prompt[0])
    counts = oa.resamples(count, len(by_prompt), len(by_prompt[0]["otb"]), seed)
    drawn = {name: oa.resampled_variances(torch.stack([each[name] for each in by_prompt]), counts) for name in names}
    pairs = [(name, "group mean") for name in names if name != "group mean"] + [("otb", rival) for rival in RIVALS]
    return {f"{a} / {b}": oa.interval(drawn[a], drawn[b]) for a, b in pairs}


def proxy(weights: policy.Parameters, ids: Tensor) -> dict[str, Any]:
    """Energies compared with true squared norms for a few rollouts, by token and cumulated."""
    energies, mask = policy.energies(weights, ids), policy.action_mask(ids)
    head = weights["head"].numel()
    assert list(weights)[2] == "head"
    first = weights["tokens"].numel() + weights["places"].numel()
    w, own, of_head, cumulated, summed, of_total, places = [], [], [], [], [], [], []
    for row in range(len(ids)):
        length = int(mask[row].sum())
        each = torch.eye(ids.shape[1] - 2)[:length]
        grads = policy.gradients(weights, ids[row : row + 1], each[None])[0].double()
        squares = grads.square()
        w.append(energies[row, :length].double())
        own.append(squares.sum(1))
        of_head.append(squares[:, first : first + head].sum(1))
        cumulated.append(energies[row, :length].double().cumsum(0))
        summed.append(squares.sum(1).cumsum(0))
        of_total.append(grads.cumsum(0).square().sum(1))
        places.append(torch.arange(length))
    tokens, sequences = torch.cat(w), torch.cat(cumulated)
    pairs = {
        "token, all parameters": (tokens, torch.cat(own)),
        "token, head only": (tokens, torch.cat(of_head)),
        "cumulated, sum of |s_j|^2": (sequences, torch.cat(summed)),
        "cumulated, |sum of s_j|^2": (sequences, torch.cat(of_total)),
    }
    keep = torch.from_numpy(np.random.default_rng(0).permutation(len(tokens))[:200])
    return {
        name: {
            "correlation": oa.correlation(x, y),
            "correlation at a place": oa.correlation_within(x, y, torch.cat(places)),
            "spread of the ratio": oa.ratio_spread(x.clamp(min=1e-9), y),
            "points": [side[keep].tolist() for side in (x, y)] if name in SCATTERED else [],
        }
        for name, (x, y) in pairs.items()
    }


def one_policy(weights: policy.Parameters, plan: Plan, seed: int) -> dict[str, Any]:
    """All results for one policy: facts about its rollouts, moments and intervals by group size, energies and norms."""
    weights = {name: value.detach().clone() for name, value in weights.items()}
    prompts = policy.new_prompts(torch.Generator().manual_seed(seed), plan.prompts)
    ids = policy.respond(weights, prompts.repeat_interleave(plan.responses, 0), plan.length, seed)
    by_prompt = [variances(weights, rows, plan) for rows in ids.split(plan.responses)]
    shapes = [shape for _, _, shape in by_prompt]
    products = {str(n): [each[n] for _, each, _ in by_prompt] for n in plan.groups}
    return {
        "shape": {key: float(np.mean([shape[key] for shape in shapes])) for key in shapes[0]},
        "moments": {
            str(n): {name: oa.pooled([found[n][name] for found, _, _ in by_prompt]) for name in by_prompt[0][0][n]}
            for n in plan.groups
        },
        "intervals": {n: intervals(each, plan.resamples, seed) for n, each in products.items()},
        "contributions": {
            n: {name: [oa.contributions(prompt[name]).tolist() for prompt in each] for name in each[0]}
            for n, each in products.items()
        },
        "proxy": proxy(weights, ids[:: plan.responses * plan.prompts // plan.looked_at][: plan.looked_at]),
    }


def one_seed(plan: Plan, seed: int) -> dict[str, Any]:
    """The early and the late policy of one supervised phase."""
    began, cells = time.process_time(), []
    weights = policy.new_parameters(seed, plan.length + 2)
    progress = policy.supervise(weights, seed, plan.length, plan.stages[-1])
    for step in tqdm(progress, total=plan.stages[-1], desc=f"seed {seed}", unit="step", mininterval=10):
        if step + 1 in plan.stages:
            stage = "early" if step + 1 == plan.stages[0] else "late"
            cells.append({"seed": seed, "stage": stage, "steps": step + 1, **one_policy(weights, plan, seed)})
    return {"processor seconds": round(time.process_time() - began, 1), "cells": cells}


def show(cell: dict[str, Any]) -> None:
    """Print the results for one policy."""
    print(f"\nseed {cell['seed']}, {cell['stage']}: " + ", ".join(f"{k} {v:.3g}" for k, v in cell["shape"].items()))
    for n, rows in cell["moments"].items():
        ends = {pair: "{:.2f} to {:.2f}".format(*values) for pair, values in cell["intervals"][n].items()}
        heads = f"{'of the group mean':>19}{'95 %':>14}{'normalised':>12}{'kept':>8}{'error':>8}"
        print(f"  N = {n:2}{'variance':>26}{heads}")
        against = rows["group mean"]
        for name, row in rows.items():
            share, normalised = (oa.share(row, against, key) for key in ("variance", "normalised"))
            of_mean = f"{share:19.3f}{ends.get(f'{name} / group mean', ''):>14}"
            print(
                f"    {name:16}{row['variance']:14.4g}{of_mean}"
                f"{normalised:12.3f}{row['kept']:8.3f}{row['kept, error']:8.3f}"
            )
        for name in RIVALS:
            ratio = oa.share(rows["otb"], rows[name], "variance")
            print(f"    otb / {name:16}{ratio:27.3f}{ends[f'otb / {name}']:>14}")
    for name, found in cell["proxy"].items():
        correlations = f"correlation {found['correlation']:.3f}, at a place {found['correlation at a place']:.3f}"
        print(f"  {name:28} {correlations}, ratio varies by {found['spread of the ratio']:.2f}")


SHOWN = ("rloo", "opo", "opo, token", "ogb", "isolated energy", "otb", TRUE_NORMS)


def ratios(axis: Any, cells: list[dict[str, Any]], pairs: list[tuple[str, str]], labels: list[str]) -> None:
    """Plot the ratio of variances of each pair over group sizes.

    Shown are the mean over `cells`, and bars from the smallest to the largest end of their intervals, side by side.
    """
    sizes = np.array([int(n) for n in cells[0]["moments"]])
    for index, ((a, b), label) in enumerate(zip(pairs, labels, strict=True)):
        look = drawing.style(index)
        beside = sizes * 2 ** (0.085 * (index - (len(pairs) - 1) / 2))
        curves = [[oa.share(rows[a], rows[b], "variance") for rows in cell["moments"].values()] for cell in cells]
        ends = np.array([[found[f"{a} / {b}"] for found in cell["intervals"].values()] for cell in cells])
        axis.plot(beside, np.mean(curves, axis=0), label=label, **look)
        axis.vlines(beside, ends[..., 0].min(0), ends[..., 1].max(0), color=look["color"], linewidth=1)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
    axis.set_xticks(sizes, [str(n) for n in sizes])


def plot(cells: list[dict[str, Any]], folder: Path) -> None:
    """Plot for the early and the late policy: variances, OTB's variance over that of its rivals, energies and norms."""
    with drawing.panels(folder / "otb_study.png", 2, 4, width=5.2, height=3.9) as axes:
        for row, stage in enumerate(("early", "late")):
            mine = [cell for cell in cells if cell["stage"] == stage]
            variance, against, token, whole = axes[4 * row : 4 * row + 4]
            size = "rollouts per group"
            drawing.title(variance, f"{stage}: variance of a group's gradient", size, "of the group mean's")
            ratios(variance, mine, [(name, "group mean") for name in SHOWN], list(SHOWN))
            drawing.title(against, f"{stage}: variance of OTB's gradient", size, "of the other's")
            ratios(against, mine, [("otb", name) for name in RIVALS], [f"of {name}" for name in RIVALS])
            for axis, name, x, y in (
                (token, SCATTERED[0], "energy w", "|gradient of the token|²"),
                (whole, SCATTERED[1], "cumulated energy W", "|gradient so far|²"),
            ):
                found = mine[0]["proxy"][name]
                seed, at_a_place = mine[0]["seed"], found["correlation at a place"]
                drawing.title(axis, f"{stage}, seed {seed}: correlation at a place {at_a_place:.2f}", x, y)
                axis.scatter(*found["points"], s=6, alpha=0.5, color=drawing.LIGHT[0], linewidths=0)
        axes[0].legend(fontsize=7, frameon=False, ncol=2)
        axes[5].legend(fontsize=7, frameon=False, ncol=2, loc="lower right")


def main(argv: list[str] | None = None) -> None:
    """Run the study."""
    parser = study_parser(__doc__, "otb_study")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = placed(parser.parse_args(argv), parser.parse_args([]))
    one_thread()
    plan = QUICK if options.quick else Plan(seeds=tuple(options.seeds))
    runs, told = kept_runs(
        [
            Planned(
                {}, options.output / f"{seed}.json", {**asdict(plan), "seeds": [seed]}, partial(one_seed, plan, seed)
            )
            for seed in plan.seeds
        ]
    )
    cells = [cell for run in runs for cell in run["cells"]]
    for cell in cells:
        show(cell)
    plot(cells, options.results)
    told |= {"plan": asdict(plan), "processor seconds": [run["processor seconds"] for run in runs], "cells": cells}
    save("otb_study", rounded(told), options.results)


if __name__ == "__main__":
    main()
