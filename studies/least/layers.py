"""In which layer has a rollout the energy that its whole gradient has?

    python -m studies.least.layers FOLDER [--task smollm2] [--problems 64] [--samples 16]

`target: optimal` weighs each rollout's reward by its energy, which should be ``|S|^2``, the squared norm of the
gradient of its log-probability in all weights. What a backward pass tells of each rollout is its gradient in the states
between layers. For the policy in FOLDER and each of its layers: how the sum of ``|dL / dx_t|^2`` over the positions
before the rollout's tokens goes with ``|S|^2`` in Adam's directions (each weight divided by the root mean square of its
gradient), and what power the gradient has with the curve ``b = c . (1, V, V^2)`` that these energies give.

The curve is fitted to the rollouts of one half of the problems and judged on those of the other, both ways. V is the
mean of a problem's other rollouts, drawn a little to the mean of all; the power with the true value, of which all
others are shares, is found by pairs of them. A rollout counts at most as much as the 99 % quantile of all.

Results: ``studies/results/least_layers_POLICY.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed

from basis_rl.baselines.optimal import OptimalBaseline
from basis_rl.text import markdown_table
from basis_rl.types import RolloutBatch
from benchmarks.common import one_thread
from studies.least.variance import CLIPPED, Rollouts, drawn, loaded, log_probs, measure_energies, of_value
from studies.runs import placed, save_table, study_parser


def adam_scales(model: Any, rollouts: Rollouts) -> dict[str, Tensor]:
    """One over the root mean square of each weight's gradient, as Adam's steps have it; fills in logit energies."""
    squares = measure_energies(model, rollouts)
    least = 1e-6 * torch.cat([each.flatten() for each in squares.values()]).mean()
    return {name: each.clamp(min=float(least)).rsqrt() for name, each in squares.items()}


def energies_of(model: Any, rollouts: Rollouts, scales: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """``|S|^2`` of each rollout, ``(N,)``, and its energies in what enters each layer and the final norm,
    ``(N, layers + 1)``."""
    states: list[Tensor] = []

    def keep(module: Any, args: tuple[Any, ...]) -> None:
        args[0].retain_grad()
        states.append(args[0])

    backbone = model.base_model
    hooks = [part.register_forward_pre_hook(keep) for part in [*backbone.layers, backbone.norm]]
    weights = dict(model.named_parameters())
    whole, layers = [], []
    for row in range(len(rollouts.ids)):
        states.clear()
        model.zero_grad()
        found, _ = log_probs(model, weights, rollouts, slice(row, row + 1))
        found.sum().backward()
        own = rollouts.places[row, rollouts.mask[row]] - 1
        whole.append(sum(float((p.grad * scales[name]).square().sum()) for name, p in weights.items()))
        layers.append([float(each.grad[0, own].square().sum()) for each in states if each.grad is not None])
        if row % 100 == 99:
            print(f"{row + 1} of {len(rollouts.ids)} rollouts", flush=True)
    for hook in hooks:
        hook.remove()
    return torch.tensor(whole, dtype=torch.float64), torch.tensor(layers, dtype=torch.float64)


def curve(rewards: Tensor, values: Tensor, energies: Tensor, learns: Tensor) -> Tensor:
    """``(N,)``: the baseline of all rollouts that those learnt from, ``learns``, give by their energies."""
    found = OptimalBaseline("optimal")
    batch = RolloutBatch(
        rewards=rewards[learns].float(),
        group_ids=torch.arange(int(learns.sum())),
        prompt_ids=[""] * int(learns.sum()),
        action_mask=torch.ones((int(learns.sum()), 1), dtype=torch.bool),
        gradient_energies=energies[learns, None].float(),
    )
    found.learn(values[learns], rewards[learns], batch)
    return found(values, torch.ones((len(values), 1), dtype=torch.bool))[0]


def measured(rollouts: Rollouts, whole: Tensor, layers: Tensor, samples: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of energy."""
    rewards = rollouts.rewards.double()
    by_problem = rewards.reshape(-1, samples)
    others = by_problem.sum(dim=1, keepdim=True) - by_problem
    values = ((others + 2 * rewards.mean()) / (samples + 1)).flatten()
    half = (torch.arange(len(rewards)) // samples) % 2
    norms = whole.clamp(max=float(whole.quantile(CLIPPED)))
    logits = rollouts.logit_energies.sum(dim=1).double()
    kinds = {"whole gradient": whole, "none": torch.ones_like(whole), "logits": logits}
    kinds |= {f"layer {place}": layers[:, place] for place in range(layers.shape[1])}
    for name, energies in kinds.items():
        powers = []
        for judged in (0, 1):
            rows = half == judged
            b = curve(rewards, values, energies, ~rows)
            found = ((rewards - b).square() * norms)[rows].mean()
            powers.append(float(found) / of_value(rewards[rows], norms[rows, None, None].sqrt(), samples))
        logs = torch.stack([energies, whole]).clamp(min=1e-30).log()
        correlation = float(torch.corrcoef(logs)[0, 1]) if name != "none" else None
        ratio = float(energies[rewards == 0].mean() / energies[rewards == 1].mean())
        yield {"energy": name, "correlation": correlation, "wrong over right": ratio, "power": powers}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and save."""
    parser = study_parser(__doc__, "least_layers")
    parser.add_argument("policy", type=Path)
    parser.add_argument("--task", default="smollm2", choices=("quickstart", "selection", "smollm2"))
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    options = placed(parser.parse_args(argv))
    one_thread()
    set_seed(0)
    model, tokenizer = loaded(options.policy)
    rollouts = drawn(model, tokenizer, options.task, options.problems, options.samples)
    print(f"{float(rollouts.rewards.mean()):.1%} of {len(rollouts.rewards)} rollouts are right", flush=True)
    whole, layers = energies_of(model, rollouts, adam_scales(model, rollouts))
    rows = list(measured(rollouts, whole, layers, options.samples))
    facts = {key: getattr(options, key) for key in ("problems", "samples", "task")}
    facts |= {"policy": options.policy.name, "right": float(rollouts.rewards.mean())}
    save_table(f"least_layers_{options.policy.name}", facts, rows, options.results)
    shown = []
    for row in rows:
        correlation = "" if row["correlation"] is None else f"{row['correlation']:.2f}"
        powers = [f"{each:.3f}" for each in row["power"]]
        shown.append([row["energy"], correlation, f"{row['wrong over right']:.1f}", *powers])
    print(markdown_table(shown, ["energy", "correlation", "wrong over right", "power, halves", ""]))
    return rows


if __name__ == "__main__":
    main()
