"""The yardstick: what an estimator's values miss, and how noisy its gradient is, on logged rollouts of a real model.

    python -m studies.yardstick [ESTIMATOR ...] [--group 1 2 4 8] [--permutations 8] [--chosen]
        [--offset X] [--data FILE]
    python -m studies.yardstick --by_rate FILE [FILE ...]
    python -m studies.yardstick --make MODEL --data FILE [--task sums] [--bf16] [--problems 64] [--rewards 256]
        [--logged 32]

ESTIMATOR is ``NAME`` or ``NAME={PARAMETERS AS JSON}``; NAME is a registered baseline or ``module:Class`` of your own, a
`basis_rl.baselines.Baseline`. Without any, those of `ROWS`. A minute on one core, no model needed.

**The data**, ``studies/results/yardstick.npz``: 64 problems of arithmetic (`examples.smollm2.problems`), and of each
256 rollouts of SmolLM2-135M after 40 steps of ``examples/smollm2/smollm2.yaml``, at temperature 1. Their mean reward is
the true value. The first 32 rollouts of each problem are logged in full: reward, tokens, log-probabilities, energies,
and the gradient of the rollout's log-probability in all weights, each weight divided by the root mean square of its
gradient (as Adam's steps are), in 64 random projections: weights get random signs and are summed in turn.

**A score.** The logged rollouts come in batches of 64: each problem once, or 32, 16 or 8 problems with 2, 4 or 8
rollouts each. The policy stays as it is, so a belief sees each problem 32 times at one rollout and 4 times at eight.

With ``--chosen`` each problem of a batch is drawn with the chances that ``frontier`` (``hard: 2, easy: 1``) gives it by
its true value, as if there were many like each of the 64. There are eight batches. A problem whose rollouts are used up
begins with them again, so beliefs, which would see them twice, are scored with one rollout per problem only.

With ``--offset X`` each reward is X larger: -0.5 is the case of -1 for wrong and 1 for right rollouts (noise does not
change with the scale), 0.2 that of 0.2 more for a form that all rollouts have.

- ``error N``: mean squared error of the baseline to the true value at the N-th visit (unbiased: less the true value's
  own noise).
- ``noise``: ``E|g - E g|^2 / |E g|^2`` of a batch's gradient g, over the later half of the visits. Alternate visits
  draw from two halves of the rollouts, so that the product of their mean gradients has no noise in expectation.
- ``rollouts``: how many times the rollouts of a batch that true values would need for the same noise.
- ``power A to B``: the same for problems that are solved with such a rate: the power of a rollout's gradient over that
  with true values, over the later half of the visits. Only rows whose advantages are not scaled compare by it.

``--by_rate`` takes the problems of several data sets together, in finer steps of how often they are solved, and plots
``power``, relative to the mean over all problems with their true values: as many times more rollouts a problem needs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from basis_rl.baselines import BASELINES, Baseline
from basis_rl.baselines.reward_range import RangedBelief
from basis_rl.registry import build
from basis_rl.samplers import Frontier, ValueBelief
from basis_rl.text import markdown_table
from basis_rl.types import Advantages, RolloutBatch
from basis_rl.values.table import ValueTable
from benchmarks.common import one_thread
from studies.drawing import panels, style, title
from studies.least.variance import Rollouts, drawn, loaded, log_probs, measure_energies, problems_and_reward
from studies.runs import RESULTS, placed, save_table, study_parser

BATCH, SKETCH, TABLE, CHOSEN = 64, 64, 8, 8
FILE = RESULTS / "yardstick.npz"
VISITS = (1, 3, 10, 32)
RATES = (0.0, 0.05, 0.5, 0.9, 1.0)  # of success, between which problems are alike
ROWS = (
    "none", "batch_mean", 'batch_mean={"target": "optimal"}', "reinforce_pp", "spo", 'spo={"normalize": false}',
    'basis_history={"target": "value"}', "basis_history", 'basis_history={"prior": "text"}', "basis",
    "dr_grpo", "grpo", "rloo", "james_stein", "ebpo", "max_rl", "ogb",
)  # fmt: skip


# Of the plot by success rate: steps; and its lines: estimator, offset of the rewards, and what the legend says.
FINE = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0)
LINES = (
    ("true value", 0.0, "true value"),
    ("none", 0.0, "no baseline, rewards of 0 and 1"),
    ("none", -0.5, "no baseline, rewards of -1 and 1"),
    ("batch_mean", 0.0, "batch_mean"),
    ('batch_mean={"target": "optimal"}', 0.0, "batch_mean, target: optimal"),
    ('basis_history={"prior": "text"}', 0.0, "basis_history, prior: text"),
)


class TrueValue(Baseline):
    """``r - V`` with the value of all rewards but the logged ones."""

    def __init__(self, values: dict[str, float]) -> None:
        self.values = values

    def advantages(self, batch: RolloutBatch) -> Advantages:
        value = torch.tensor([self.values[name] for name in batch.prompt_ids], dtype=torch.float64)
        return Advantages(values=batch.rewards.double() - value, baseline=value, metrics={})


def sketched(model: Any, rollouts: Rollouts, squares: dict[str, Tensor]) -> Tensor:
    """``(N, SKETCH)``: random projections of the gradient of each rollout's log-probability, scaled as Adam's steps."""
    # What never had a gradient has none to project.
    least = 1e-6 * torch.cat([each.flatten() for each in squares.values()]).mean()
    generator = torch.Generator().manual_seed(0)
    factors = {}
    for name, each in squares.items():
        signs = torch.randint(0, 2, each.shape, generator=generator, dtype=torch.int8) * 2 - 1
        factors[name] = signs * each.clamp(min=float(least)).rsqrt()
    weights = dict(model.named_parameters())
    found = torch.zeros(len(rollouts.ids), SKETCH)
    for row in range(len(rollouts.ids)):
        model.zero_grad()
        log_probs(model, weights, rollouts, slice(row, row + 1))[0].sum().backward()
        for name, weight in weights.items():
            flat = (weight.grad.float() * factors[name]).flatten()
            whole = len(flat) // SKETCH * SKETCH
            found[row] += flat[:whole].view(-1, SKETCH).sum(dim=0)
            found[row, : len(flat) - whole] += flat[whole:]
        if (row + 1) % BATCH == 0:
            print(f"gradients of {row + 1} of {len(found)} rollouts", flush=True)
    model.zero_grad()
    return found


def make(options: argparse.Namespace) -> None:
    """Sample, measure and write the data set."""
    torch.manual_seed(0)
    problems, rewards, logged, path = options.problems, options.rewards, options.logged, options.data
    model, tokenizer = loaded(options.make, torch.bfloat16 if options.bf16 else torch.float32)
    every = drawn(model, tokenizer, options.task, problems, rewards)
    rows = (torch.arange(problems)[:, None] * rewards + torch.arange(logged)).flatten()
    nothing = torch.zeros(len(rows), every.mask.shape[1])
    kept = Rollouts(
        every.ids[rows], every.mask[rows], every.places[rows], every.rewards[rows], nothing, nothing.clone(), {}
    )
    print(f"{len(every.rewards)} rollouts, {float(every.rewards.mean()):.3f} right", flush=True)
    squares = measure_energies(model, kept)
    with torch.no_grad():
        parts = [slice(start, start + BATCH) for start in range(0, len(rows), BATCH)]
        scores = torch.cat([log_probs(model, dict(model.named_parameters()), kept, part)[0] for part in parts])
    small = {
        "rewards": every.rewards.reshape(problems, rewards).bool(),
        "tokens": torch.where(kept.mask, kept.ids.gather(1, kept.places), -1).to(torch.int32),
        "log_probs": scores.half(),
        "energies": kept.logit_energies.half(),
        "gradient_energies": kept.energies.float(),
        "gradients": sketched(model, kept, squares).half(),
    }
    prompts = problems_and_reward(options.task, problems)[0]
    arrays: dict[str, Any] = {name: each.numpy() for name, each in small.items()}
    arrays["texts"] = np.array([prompt[-1]["content"] for prompt in prompts])
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


class Data:
    """What ``yardstick.npz`` holds; rollouts are numbered by problem, L of each."""

    def __init__(self, path: Path, offset: float = 0.0) -> None:
        self.offset = offset
        with np.load(path) as file:
            found = {name: torch.from_numpy(file[name]) for name in file.files if name != "texts"}
            self.texts = file["texts"].tolist()
        self.problems, self.all = found["rewards"].shape
        self.logged = len(found["tokens"]) // self.problems
        first, rest = found["rewards"].float().split([self.logged, self.all - self.logged], dim=1)
        self.rewards = first.flatten() + offset
        # A table of reference rollouts, for those that need one; the true value knows nothing of its rollouts.
        table, rest = rest.split([TABLE, rest.shape[1] - TABLE], dim=1)
        self.table = ValueTable.from_rewards({str(i): row.tolist() for i, row in enumerate(table + offset)})
        self.solved = rest.double().mean(dim=1)
        self.values = self.solved + offset
        self.noise_of_values = float((self.solved * (1 - self.solved)).mean() / (rest.shape[1] - 1))
        self.mask = found["tokens"] >= 0
        self.signals = {name: found[name].float() for name in ("log_probs", "energies", "gradient_energies")}
        self.gradients = found["gradients"].double()

    def batch(self, rows: Tensor, group: int, step: int, wanted: frozenset[str]) -> RolloutBatch:
        numbers = (rows // self.logged).tolist()
        given: dict[str, Any] = {name: each[rows] for name, each in self.signals.items() if name in wanted}
        if "prompt_texts" in wanted:
            given["prompt_texts"] = [self.texts[number] for number in numbers]
        return RolloutBatch(
            rewards=self.rewards[rows], group_ids=torch.arange(len(rows)) // group,
            prompt_ids=[str(number) for number in numbers], action_mask=self.mask[rows], step=step, **given,
        )  # fmt: skip

    def orders(self, generator: torch.Generator) -> Tensor:
        """``(P, L)``: the rollouts of each problem, those of the first half of them first."""
        half = self.logged // 2
        halves = [[torch.randperm(half, generator=generator) + start for start in (0, half)] for _ in self.values]
        return torch.stack([torch.cat(each) for each in halves])

    def chosen_batches(self, group: int, seed: int) -> Iterator[tuple[int, Tensor]]:
        """The same with a problem drawn for each place."""
        generator = torch.Generator().manual_seed(seed)
        orders = self.orders(generator).view(self.problems, 2, -1, group)
        chances = Frontier(hard=2.0, easy=1.0).weights(self.solved, torch.zeros_like(self.solved))
        used = torch.zeros(self.problems, 2, dtype=torch.int64)
        for visit in range(CHOSEN):
            rows = []
            for number in torch.multinomial(chances, BATCH // group, replacement=True, generator=generator).tolist():
                place = number, visit % 2
                rows.append(self.logged * number + orders[place][used[place] % orders.shape[2]])
                used[place] += 1
            yield visit, torch.cat(rows)

    def batches(self, group: int, seed: int) -> Iterator[tuple[int, Tensor]]:
        """Visits, counted from 0, and rollouts of batches; even visits draw from the first half of each problem's."""
        generator = torch.Generator().manual_seed(seed)
        orders = self.orders(generator)
        # (problem, half, visit, rollout) -> (problem, visit, rollout), the halves in turn.
        turns = orders.view(self.problems, 2, -1, group).transpose(1, 2).reshape(self.problems, -1, group)
        turns = turns + self.logged * torch.arange(self.problems)[:, None, None]
        for visit in range(turns.shape[1]):
            for chosen in torch.randperm(self.problems, generator=generator).split(BATCH // group):
                yield visit, turns[chosen, visit].flatten()


def estimator(text: str, data: Data) -> Baseline:
    """``NAME`` or ``NAME={JSON}``."""
    if text == "true value":
        return TrueValue({str(i): float(v) for i, v in enumerate(data.values)})
    name, _, params = text.partition("=")
    given = json.loads(params) if params else {}
    if name in ("basis", "a_star_po"):
        given.setdefault("values", data.table)
    built: Baseline = build("baseline", BASELINES, Baseline, name, given)
    if isinstance(built, RangedBelief):
        built.range.declare((data.offset, data.offset + 1.0))
    missing = (built.requires | built.learns_from) - {*data.signals, "prompt_texts", "turn_rewards"}
    if missing:
        raise SystemExit(f"{text} reads {', '.join(sorted(missing))}, which the logged rollouts do not have.")
    return built


@dataclass
class Moments:
    """What an estimator's batches had: errors by visit, mean gradients of even and of odd visits, and for each problem
    the power of its rollouts' gradients, with their number; all but the errors over the later half of the batches."""

    errors: dict[int, list[float]]
    gradients: tuple[list[Tensor], list[Tensor]]
    powers: Tensor
    counts: Tensor


def moments(text: str, group: int, permutations: int, data: Data, chosen: bool = False) -> Moments:
    """Let an estimator see the batches of each permutation."""
    norms = data.gradients.square().sum(dim=1)
    zeros = torch.zeros(data.problems, dtype=torch.float64)
    seen = Moments({}, ([], []), zeros, zeros.clone())
    for seed in range(permutations):
        baseline = estimator(text, data)
        wanted = baseline.requires | baseline.learns_from
        batches = list((data.chosen_batches if chosen else data.batches)(group, seed))
        for step, (visit, rows) in enumerate(batches):
            batch = data.batch(rows, group, step, wanted)
            found = baseline.advantages(batch)
            if found.values.ndim == 2:
                raise SystemExit(f"{text} has an advantage for each token; the gradients here are those of rollouts.")
            away = (found.baseline.double() - data.values[rows // data.logged]).square().mean()
            seen.errors.setdefault(visit + 1, []).append(float(away) - data.noise_of_values)
            if step >= len(batches) // 2:
                seen.powers.index_add_(0, rows // data.logged, found.values.double() ** 2 * norms[rows])
                seen.counts += (rows // data.logged).bincount(minlength=data.problems)
                mean = (found.values.double()[:, None] * data.gradients[rows]).mean(dim=0)
                seen.gradients[visit % 2].append(mean)
            baseline.update(batch)
    return seen


def score(text: str, group: int, permutations: int, data: Data, chosen: bool = False) -> dict[str, Any]:
    """Errors by visit (of chosen problems: by batch), and the moments of a batch's gradient."""
    seen = moments(text, group, permutations, data, chosen)
    even, odd = (torch.stack(each) for each in seen.gradients)
    signal = float((even.mean(dim=0) * odd.mean(dim=0)).sum())
    power = float(torch.cat([even, odd]).square().sum(dim=1).mean())
    # Too little signal to be told from 0.
    noise = (power - signal) / signal if signal > 0 else float("nan")
    told = {f"error {visit}": float(np.mean(seen.errors[visit])) for visit in VISITS if visit in seen.errors}
    blank = {f"error {visit}": None for visit in VISITS}
    bins = torch.bucketize(data.solved, torch.tensor(RATES[1:-1], dtype=torch.float64), right=True)
    rates = enumerate(pairwise(RATES))
    mean = {edges: float(seen.powers[bins == i].sum() / seen.counts[bins == i].sum()) for i, edges in rates}
    by_rate = {f"power {low:g} to {high:g}": each for (low, high), each in mean.items()}
    prompts = "chosen" if chosen else "uniform"
    return {"estimator": text, "prompts": prompts, "group": group, **blank, **told, "noise": noise, **by_rate}


def by_rate(paths: list[Path], permutations: int) -> list[dict[str, Any]]:
    """For each of `LINES` and each step of `FINE`: the mean power of a rollout's gradient, one rollout per problem.

    Each data set's power is relative to that of the true value over all of its problems, whose mean is 1.
    """
    edges = torch.tensor(FINE[1:-1], dtype=torch.float64)
    powers: dict[str, Tensor] = {}
    counts = torch.zeros(len(FINE) - 1, dtype=torch.float64)
    for path in paths:
        bins = torch.bucketize(Data(path).solved, edges, right=True)
        counts.index_add_(0, bins, torch.ones(len(bins), dtype=torch.float64))
        whole = moments("true value", 1, permutations, Data(path)).powers.mean()
        for text, offset, name in LINES:
            own = moments(text, 1, permutations, Data(path, offset)).powers / whole
            powers.setdefault(name, torch.zeros_like(counts)).index_add_(0, bins, own)
    return [
        {
            "baseline": name,
            "from": low,
            "to": high,
            "problems": int(counts[i]),
            "power": float(powers[name][i] / counts[i]),
        }
        for *_, name in LINES
        for i, (low, high) in enumerate(pairwise(FINE))
        if counts[i]
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A line for each baseline."""
    with panels(path, 1, 1, width=6.6, height=4.0) as (axis,):
        for index, (*_, name) in enumerate(LINES):
            own = [row for row in rows if row["baseline"] == name]
            middle = [(row["from"] + row["to"]) / 2 for row in own]
            axis.plot(middle, [row["power"] for row in own], label=name, **style(index))
        axis.set_yscale("log")
        # The true value of what is always solved has next to no noise.
        axis.set_ylim(bottom=3e-3)
        title(axis, "", "how often the policy solves the problem", "noise of a rollout's gradient")
        axis.legend(frameon=False)


def scores(
    names: list[str], groups: list[int], permutations: int, data: Data, chosen: bool = False
) -> list[dict[str, Any]]:
    """A row for each estimator and each group size that it takes; the true value's comes first."""
    rows = []
    for group in groups:
        for text in ["true value", *names]:
            built = estimator(text, data)
            if built.min_group_size > group or (chosen and group > 1 and isinstance(built, ValueBelief)):
                continue
            rows.append(score(text, group, permutations, data, chosen))
    best = dict(rows[0])
    for row in rows:
        row["rollouts"] = row["noise"] / best["noise"]
        for name in filter(lambda key: key.startswith("power"), best):
            row[name] = row[name] / best[name] if best[name] else float("nan")
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Make the data, or score, print and, without ESTIMATOR and offset, save."""
    parser = study_parser(__doc__, "yardstick")
    parser.add_argument("estimators", nargs="*", metavar="ESTIMATOR")
    parser.add_argument("--group", nargs="+", type=int, default=[1, 2, 4, 8], choices=[1, 2, 4, 8])
    parser.add_argument("--permutations", type=int, default=8)
    parser.add_argument("--chosen", action="store_true", help="draw problems as a sampler does")
    parser.add_argument("--offset", type=float, default=0.0, help="is added to each reward")
    parser.add_argument("--by_rate", type=Path, nargs="+", metavar="FILE", help="plot the power over the success rate")
    parser.add_argument("--make", type=Path, metavar="MODEL", help="make the data set with this model")
    parser.add_argument("--task", choices=("smollm2", "sums"), default="smollm2", help="problems of --make")
    parser.add_argument("--bf16", action="store_true", help="--make on processors that have it")
    for name, default in (("problems", 64), ("rewards", 256), ("logged", 32)):
        parser.add_argument(f"--{name}", type=int, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, default=FILE, help=f"the data set ({FILE.name})")
    options = placed(parser.parse_args(argv))
    one_thread()
    if options.quick:
        options.group, options.permutations = [1], 1
    if options.by_rate:
        rows = by_rate(options.by_rate, options.permutations)
        facts = {"permutations": options.permutations, "data": [path.name for path in options.by_rate]}
        save_table("yardstick_by_rate", facts, rows, options.results)
        draw(rows, options.results / "yardstick_by_rate.png")
        return rows
    if options.make:
        make(options)
    names = options.estimators or list(ROWS)
    data = Data(options.data, options.offset)
    rows = scores(names, options.group, options.permutations, data, options.chosen)
    shown = [[f"{each:.4f}" if isinstance(each, float) else each or "" for each in row.values()] for row in rows]
    print(markdown_table(shown, list(rows[0])))
    if not options.estimators and not options.offset:
        name = options.data.stem + ("_chosen" if options.chosen else "")
        save_table(name, {"permutations": options.permutations}, rows, options.results)
    return rows


if __name__ == "__main__":
    main()
