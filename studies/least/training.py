"""Does it train better to aim at the least variance of the gradient instead of at the value?

    python -m studies.least.training [--part tune | judge] [--mostly | --long] [--worker 0/2] [--report] [--quick]

The quickstart's policy and problems, one warm start for each seed, 64 rollouts per step (64 prompts x 1 to 8 x 8), one
update per step, objective ``grpo``, a constant learning rate and no KL. The rewards are 0 and 1; or -1 and 1; or 0
and 1 with 0.2 more for a rollout that is one boxed integer. Baselines whose advantages only double with -1 and 1 (all
but `none`) train with them as with 0 and 1, since Adam divides by the gradient's size; one is run to see it.

Every row is judged at its own best of four rates, after 80 and after 400 steps. The rates are chosen by two seeds
(``--part tune``) by which nothing is judged, and others are judged at them (``--part judge``, which needs all
runs of the first part). Measured on 300 held-out problems, eight rollouts each at temperature 1: accuracy and pass@8;
and the entropy of the policy's tokens over the last steps.

``--mostly`` asks the same of a policy that begins by solving most problems: the warm start ends at 70 %, a run has 200
steps, measured every 20, and the report has the rollouts and processor seconds to 85 %, too (`MOSTLY`).

``--long`` goes on four times as long, 1,600 steps, at the rates that are best for 400 (`LONG`, one seed), to see
whether a run stops or falls, and measures each kind of problem, too.

A run that is in the output folder (``runs/least_training``) is not repeated. Several workers share the runs, each with
one thread. Results: ``studies/results/least_training.json``, and with ``_mostly`` or ``_long`` behind the name.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from basis_rl import BasisTrainer
from basis_rl.baselines import build_baseline
from basis_rl.data import load_prompts
from basis_rl.engine import Sampling, prompt_tokens, sample
from basis_rl.recipe.file import parse_recipe
from benchmarks.common import one_thread
from studies.runs import Planned, kept_runs, placed, read_table, save_table, study_parser
from studies.small_policy import TOKENS, family, trainer_for
from studies.training import RECIPE, Measured, crossing, measured_training, quickstart_model

# A row: baseline, its parameters, rollouts per prompt, sampler.
ROWS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "none": ("none", {}, 1, "uniform"),
    "batch_mean": ("batch_mean", {}, 1, "uniform"),
    "basis_history": ("basis_history", {"target": "value"}, 1, "uniform"),
    "batch_mean, optimal": ("batch_mean", {"target": "optimal"}, 1, "uniform"),
    "basis_history, optimal": ("basis_history", {"target": "optimal"}, 1, "uniform"),
    "basis_history, optimal_token": ("basis_history", {"target": "optimal_token"}, 1, "uniform"),
    "basis_history, text, frontier": ("basis_history", {"prior": "text"}, 1, "frontier"),
    "rloo, G = 8": ("rloo", {}, 8, "uniform"),
    "grpo, G = 8": ("grpo", {}, 8, "uniform"),
    "grpo, G = 4": ("grpo", {}, 4, "uniform"),
    "grpo, G = 2": ("grpo", {}, 2, "uniform"),
    "none, G = 8": ("none", {}, 8, "uniform"),
    "basis_history, optimal, G = 8": ("basis_history", {"target": "optimal"}, 8, "uniform"),
}
# What a wrong and a right rollout get, and what is added for the form.
REWARDS = {"0/1": (0.0, 1.0, 0.0), "-1/+1": (-1.0, 1.0, 0.0), "0/1 + form": (0.0, 1.0, 0.2)}
# The rows of each kind of reward.
SEVEN = (
    "none", "batch_mean", "basis_history", "batch_mean, optimal", "basis_history, optimal",
    "basis_history, optimal_token", "rloo, G = 8",
)  # fmt: skip
RUN = {"0/1": SEVEN, "-1/+1": ("none", "basis_history, optimal"), "0/1 + form": SEVEN}
# With --mostly.
MOSTLY = {
    "0/1": (
        "none", "batch_mean", "batch_mean, optimal", "basis_history, optimal", "basis_history, text, frontier",
        "grpo, G = 8", "grpo, G = 4", "grpo, G = 2", "none, G = 8", "basis_history, optimal, G = 8",
    ),
    "-1/+1": ("none",),
}  # fmt: skip
LEVEL = 0.85
# With --long: row, rewards, and the rate that is best for 400 steps by ``least_training.json`` (a row that it does not
# have gets that of the most like it), and for `none` and the target of least variance the other one's, too.
LONG = (
    ("none", "0/1", 1e-4),
    ("none", "0/1", 3e-4),
    ("none", "-1/+1", 1e-4),
    ("basis_history, optimal", "0/1", 1e-4),
    ("basis_history, optimal", "0/1", 3e-4),
    ("basis_history, text, frontier", "0/1", 3e-4),
    ("grpo, G = 8", "0/1", 1e-4),
)
LONG_SEEDS = 1
RATES = [3e-5, 1e-4, 3e-4, 1e-3]
TUNED, JUDGED = [5, 6], [0, 1, 2, 3, 4]
STEPS = (80, 400)
ONE_BOX = re.compile(r"\\boxed\{-?\d+\}")


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the study.

    Attributes:
        steps: of a run, whose measurements are `STEPS` as shares of 400.
        batch: rollouts per step.
        held_out: problems that are measured.
        samples: rollouts for each of them.
        problems: that are drawn for training.
        warm_start: share of right answers, and the most steps, at which the warm start ends.
        every: steps between measurements; 0 for `STEPS` alone.
    """

    steps: int = 400
    batch: int = 64
    held_out: int = 300
    samples: int = 8
    problems: int = 20_000
    warm_start: tuple[float, int] = (0.45, 3000)
    every: int = 0

    @property
    def judged(self) -> tuple[int, ...]:
        """The steps after which rows are compared, each at its best rate for them."""
        return (self.steps,) if self.every else tuple(self.steps * step // STEPS[-1] for step in STEPS)

    @property
    def measured(self) -> tuple[int, ...]:
        return tuple(range(self.every, self.steps + 1, self.every)) if self.every else self.judged


def reward_of(kind: str) -> Callable[..., list[float]]:
    """The reward of a rollout by the kind's numbers; right is exactly the boxed gold."""
    low, high, form = REWARDS[kind]

    def reward(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float]:
        texts = [each[0]["content"].strip() for each in completions]
        right = [text == f"\\boxed{{{gold}}}" for text, gold in zip(texts, solution, strict=True)]
        formed = [ONE_BOX.fullmatch(text) is not None for text in texts]
        return [low + (high - low) * r + form * f for r, f in zip(right, formed, strict=True)]

    return reward


def problems_of(scale: Scale, held_out: bool) -> Dataset:
    """The quickstart's."""
    data = parse_recipe([RECIPE, "--dataset_kwargs.size", str(scale.problems)]).data
    found = load_prompts(data, conversational=True, held_out=held_out)
    return found.shuffle(seed=0).select(range(min(scale.held_out, len(found)))) if held_out else found


class MeasuredAt(Measured):
    """Measures before training and after these steps."""

    def __init__(self, trainer: BasisTrainer, score: Callable[[Any], dict[str, float]], steps: Sequence[int]) -> None:
        super().__init__(trainer, score, 1)
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step in self.steps:
            super().on_step_end(args, state, control, **given)


def scores(model: Any, tokenizer: Any, problems: Dataset, samples: int) -> dict[str, float]:
    """Accuracy and pass@n of `samples` rollouts per problem; and the accuracy by digits and sign."""
    tokens = [prompt_tokens(prompt, tokenizer, {}) for prompt in problems["prompt"]]
    drawn = sample(model, tokenizer, tokens, Sampling(TOKENS), num_samples=samples, batch_size=2400)
    right = reward_of("0/1")
    each = []
    for i, answers in drawn:
        texts = [[{"content": answer.text.replace(tokenizer.eos_token, "")}] for answer in answers]
        each.append(right(texts, [problems[i]["solution"]] * samples))
    found = {"accuracy": mean(map(mean, each)), "pass": mean(float(max(row)) for row in each)}
    by_kind: dict[str, list[float]] = {}
    for prompt, row in zip(problems["prompt"], each, strict=True):
        number = family(prompt[-1]["content"])
        kind = f"{1 + number // 4} and {1 + number // 2 % 2} digits, {'-' if number % 2 else '+'}"
        by_kind.setdefault(kind, []).append(mean(row))
    return found | {kind: mean(by_kind[kind]) for kind in sorted(by_kind)}


def run(scale: Scale, row: str, kind: str, rate: float, seed: int, output: Path, finer: bool = False) -> dict[str, Any]:
    """Train once; the columns of the table, of a `finer` one entropy and kinds of problems at each measurement."""
    train = problems_of(scale, held_out=False)
    held_out = problems_of(scale, held_out=True)
    until, most = scale.warm_start
    folder = output / f"warm{seed}"
    quickstart_model(train, seed, folder, until=until, max_steps=most)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    name, kwargs, group, sampler = ROWS[row]
    trainer = trainer_for(
        model, tokenizer, train, build_baseline(name, **kwargs), output / f"run{os.getpid()}", reward_of(kind),
        prompt_sampler=sampler, num_generations=group, steps_per_generation=1,
        per_device_train_batch_size=scale.batch, max_steps=scale.steps, learning_rate=rate, seed=seed,
        logging_steps=min(20, scale.every or 20), overwrite_output_dir=True,
    )  # fmt: skip
    measured = MeasuredAt(trainer, lambda model: scores(model, tokenizer, held_out, scale.samples), scale.measured)
    points = measured_training(trainer, measured)
    logged = [(each["step"], each["entropy"]) for each in trainer.state.log_history if "entropy" in each]
    found: dict[str, Any] = {
        "steps": [point.step for point in points],
        "accuracy": [point.scores["accuracy"] for point in points],
        "pass": [point.scores["pass"] for point in points],
        "entropy": mean([entropy for _, entropy in logged[-2:]]),
        "seconds": [point.cpu for point in points],
    }
    if finer:
        # Of the last two logs before a measurement; before training, of the first two.
        before = [[entropy for step, entropy in logged if step <= max(point.step, logged[1][0])] for point in points]
        found["entropies"] = [mean(each[-2:]) for each in before]
        found["kinds"] = [{k: v for k, v in point.scores.items() if " " in k} for point in points]
    return found


def planned(scale: Scale, output: Path, row: str, kind: str, rate: float, seed: int, finer: bool = False) -> Planned:
    """The run with its file."""
    labels = {"row": row, "reward": kind, "rate": rate, "seed": seed}
    file = re.sub(r"[^\w.-]+", "_", f"{kind}-{row}-{rate:g}-seed{seed}") + ".json"
    settings = {**dataclasses.asdict(scale), **labels, "baseline": ROWS[row]}
    return Planned(labels, output / file, settings, partial(run, scale, row, kind, rate, seed, output, finer))


def best_rates(runs: Sequence[dict[str, Any]], scale: Scale) -> dict[tuple[str, str, int], float]:
    """For each row, kind of reward and step: the rate with the best mean accuracy over the seeds for tuning."""
    found: dict[tuple[str, str, int], dict[float, list[float]]] = {}
    for each in runs:
        if each["seed"] in TUNED:
            for step in scale.judged:
                accuracy = each["accuracy"][each["steps"].index(step)]
                cell = found.setdefault((each["row"], each["reward"], step), {})
                cell.setdefault(each["rate"], []).append(accuracy)
    return {cell: max(by_rate, key=lambda rate: mean(by_rate[rate])) for cell, by_rate in found.items()}


def runs_of(
    scale: Scale, output: Path, part: str, stored: Sequence[dict[str, Any]], rows_of: dict[str, tuple[str, ...]]
) -> list[Planned]:
    """All runs of a part, which follow from what is stored of the first one."""
    plan = partial(planned, scale, output)
    if part == "tune":
        cells = [(row, kind, rate) for kind, rows in rows_of.items() for row in rows for rate in RATES]
        # What has unlearnt the task with the first seed is not tried with the others.
        worse = {(e["row"], e["reward"], e["rate"]) for e in stored if e["accuracy"][-1] < e["accuracy"][0]}
        first = [plan(*cell, TUNED[0]) for cell in cells]
        return first + [plan(*cell, seed) for seed in TUNED[1:] for cell in cells if cell not in worse]
    rates = best_rates(stored, scale)
    best = dict.fromkeys((row, kind, rate) for (row, kind, _), rate in rates.items())
    return [plan(*cell, seed) for seed in JUDGED for cell in best]


def report(rows: Sequence[dict[str, Any]], scale: Scale) -> list[str]:
    """A line for each row, kind of reward and number of steps, at the rate that was chosen for it."""
    lines = []
    for (row, kind, step), rate in sorted(best_rates(rows, scale).items(), key=lambda item: item[0][::-1]):
        found = [e for e in rows if (e["row"], e["reward"], e["rate"]) == (row, kind, rate) and e["seed"] in JUDGED]
        if found:
            at = found[0]["steps"].index(step)
            accuracy = [100 * each["accuracy"][at] for each in found]
            ends = f"{mean(accuracy):.1f} ({min(accuracy):.1f} to {max(accuracy):.1f})"
            passed = 100 * mean(each["pass"][at] for each in found)
            entropy = f"; entropy {mean(e['entropy'] for e in found):.2f}" if step == scale.measured[-1] else ""
            lines.append(f"{kind}, {step} steps, {row}, {rate:g}: {ends}; pass@8 {passed:.1f}{entropy}")
            if scale.every:
                # A step has 64 rollouts.
                told = [
                    [crossing(each[unit], each["accuracy"], LEVEL) for each in found] for unit in ("steps", "seconds")
                ]
                reached = [", ".join("-" if at is None else f"{at:.0f}" for at in each) for each in told]
                lines[-1] += f"; to {LEVEL:.0%}: steps {reached[0]}; seconds {reached[1]}"
    return lines


def long_report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each row and seed: accuracy, pass@8 and entropy over the steps, and the kinds of problems at the end."""
    lines = []
    for each in rows:
        lines.append(f"{each['row']}, {each['reward']}, {each['rate']:g}, seed {each['seed']}")
        for name, factor in (("accuracy", 100), ("pass", 100), ("entropies", 1)):
            lines.append(f"  {name}: " + ", ".join(f"{factor * value:.3g}" for value in each[name]))
        for when, point in (("start", each["kinds"][0]), ("end", each["kinds"][-1])):
            lines.append(f"  {when}: " + "; ".join(f"{kind} {100 * value:.0f} %" for kind, value in point.items()))
    return lines


def trained(
    options: argparse.Namespace, scale: Scale, rows_of: dict[str, tuple[str, ...]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Make this worker's runs; all that are stored, with their facts."""
    one_thread()
    worker, workers = map(int, options.worker.split("/"))
    if options.long:
        cells = [(*cell, seed) for seed in JUDGED[:LONG_SEEDS] for cell in LONG]
        tuned = chosen = [planned(scale, options.output, *cell, finer=True) for cell in cells]
    else:
        plans = partial(runs_of, scale, options.output, rows_of=rows_of)
        stored, _ = kept_runs(plans("tune", ()), 0)
        tuned = plans("tune", stored)
        stored, _ = kept_runs(tuned, 0)
        chosen = tuned if options.part == "tune" else plans("judge", stored)
    kept_runs(chosen[worker::workers][:1] if options.quick else chosen[worker::workers])
    return kept_runs([*tuned, *(chosen if chosen is not tuned else [])], 0)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = study_parser(__doc__, "least_training")
    parser.add_argument("--part", choices=("tune", "judge"), default="tune")
    parser.add_argument("--mostly", action="store_true", help="begin with a policy that solves most problems")
    parser.add_argument("--long", action="store_true", help="four times as many steps")
    parser.add_argument("--worker", default="0/1", help="K/N: make every Nth run, from the Kth on")
    parser.add_argument("--report", action="store_true", help="print the stored table, and train nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run a part; returns all runs that are stored."""
    options = parse(argv)
    name, rows_of, scale = "least_training", RUN, Scale()
    if options.mostly:
        name, rows_of = "least_training_mostly", MOSTLY
        scale = Scale(steps=200, every=20, warm_start=(0.7, 12_000))
    elif options.long:
        name, scale = "least_training_long", Scale(steps=1600, every=200)
    options.study = name
    placed(options)
    if options.quick:
        scale = Scale(
            steps=10, batch=16, held_out=8, samples=2, problems=400, warm_start=(0.45, 5), every=5 if scale.every else 0
        )
    table = options.results / f"{name}.json"
    if options.report:
        runs = read_table(table)[1]
    else:
        runs, facts = trained(options, scale, rows_of)
        save_table(name, facts, runs, options.results)
    print("\n".join(long_report(runs) if options.long else report(runs, scale)))
    return runs


if __name__ == "__main__":
    main()
