"""Does it help to choose prompts by the value belief, and when do estimators differ?

    python -m studies.selection.study [--again | --long | --unequal | --target | --judge | --task alike]
        [--runs N] [--report] [--quick]

The task is similar to RLVR (`studies.selection.task`): 66 % of the prompts are nearly solved; 19 % are hard, because
they need two right choices among strategies of which the likeliest is wrong; and 15 % are impossible. Each row of the
comparison is a baseline with a prompt sampler. `BasisTrainer` trains it from ONE warm start for each seed, at several
constant learning rates, and it is judged at the rate that suits it best. Every step is one update on 64 rollouts, 64
prompts x 1 or 8 x 8, with objective ``grpo`` and no KL. A run ends when it has sampled its budget of rollouts; those
that a prompt sampler discards count. The rollouts of a value table, which only `TABLES` have, are counted separately.
Accuracy and pass@8 are measured with eight rollouts at temperature 1 for each held-out prompt, easy and hard ones.

``--again`` repeats the most important rows with six further seeds: the settings that are recommended were chosen by
the results of the first three. ``--target`` has the rows that take the baseline of least variance, and ``--judge`` has
these and three others with the further seeds, each at the rate that suited it best with the first three.
``--task alike`` has prompts of one difficulty, so nothing can be gained by choosing. ``--long`` is four times as long,
to see which rows collapse. ``--unequal`` compares equal groups with those that ``max_generations`` divides by the
belief. With ``--rows`` or ``--samplers``, each of the rows is run with each of the samplers.

How the task was chosen: the choices below were made with uniform prompts and one seed only, and not to favour any row.
The warm start (1,500 steps, about two minutes) leaves easy prompts at 87 %, hard ones at 6 % and the pass@8 of hard
ones at 40 %, so right rollouts are rare, and most hard prompts are not solved by any of eight. These variants were
dropped: strategies that only blur a result (after 40 steps all three rows had learned to add without them: 86 to 99 %);
one favourite strategy for all kinds (the policy then only learns to avoid it: 11 % of the hard prompts are right at
3e-4 and 6e-4, which is what choosing among the other three strategies at random gives); and favourites of each kind at
34 % and right strategies at 22 % with eight hard kinds (both rows stayed at 6 %). The learning rates bracket the one at
which groups of eight are best; at 1.2e-3 they end at 12 %.

Results: the tables ``studies/results/selection_study*.json``, with a plot, but only for the whole study with its
default settings. A run that is in the output folder (``runs/selection_study``) is not repeated, so the command can be
resumed after an interruption, or make only ``--runs`` new runs at a time. ``--report`` prints and plots the table that
is stored, and trains nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from basis_rl import BasisTrainer
from basis_rl.baselines import Baseline, build_baseline
from basis_rl.samplers import PromptSampler, build_sampler
from basis_rl.values import ValueTable
from benchmarks.common import one_thread
from studies.runs import RESULTS, Planned, kept, kept_runs, placed, read_table, rounded, save_table, study_parser
from studies.selection import report
from studies.selection.task import TASKS, TOKENS, counting, datasets, reward, warm_model
from studies.small_policy import draw, trainer_for
from studies.training import Measured, measured_training

GROUPS, UNIFORM, DYNAMIC, TABLE = report.REFERENCE, "uniform", "dynamic", "basis"
HISTORY, LCB, LCB_TABLE = "basis_history", "basis_history, lcb", "basis_history, table, lcb"
# With ``belief: gaussian``, which was the default when most rows were measured.
GAUSSIAN, TEXT = "basis_history, gaussian", "basis_history, text, gaussian"
LCB_TEXT = "basis_history, text, lcb"
# Without a table, Beta beliefs; the others have ``target: value``, which was the default when they were measured.
OPTIMAL, OPTIMAL_TOKEN = "basis_history, optimal", "basis_history, optimal_token"
OPTIMAL_LCB, MEAN_OPTIMAL = "basis_history, optimal, lcb", "batch_mean, optimal"
HISTORY_TABLE = "basis_history, table, gaussian"
UNEQUAL = "grpo G=8, at most 24"
# The baseline of a row, and its rollouts per prompt.
ROWS: dict[str, tuple[str, int]] = {
    GROUPS: ("grpo", 8),
    UNEQUAL: ("grpo", 8),  # on average
    GAUSSIAN: ("basis_history", 1),  # without a table
    HISTORY_TABLE: ("basis_history", 1),  # begins with the table's values
    HISTORY: ("basis_history", 1),  # without a table, Beta beliefs
    LCB: ("basis_history", 1),  # the same, and the baseline is their lower confidence bound
    LCB_TABLE: ("basis_history", 1),  # the same with a table
    LCB_TEXT: ("basis_history", 1),  # the same without a table, with the prior from the text
    OPTIMAL: ("basis_history", 1),
    OPTIMAL_LCB: ("basis_history", 1),
    MEAN_OPTIMAL: ("batch_mean", 1),
    OPTIMAL_TOKEN: ("basis_history", 1),
    TEXT: ("basis_history", 1),  # no table, but the prior from the text that the belief beside other baselines has
    "none": ("none", 1),
    "batch_mean": ("batch_mean", 1),
    TABLE: ("basis", 1),
    "ppo": ("ppo", 1),
    "spo": ("spo", 1),
}
MOST = {UNEQUAL: 24}  # `max_generations`
TABLES = (TABLE, HISTORY_TABLE, LCB_TABLE)
# The exponents of (1 - V) and V may follow a name, and then the floor.
SAMPLERS = (UNIFORM, "variance", "frontier", "frontier 2:1", "spo", "thompson", DYNAMIC)
BEST = "frontier 2:1"
# The rows of each study with their samplers, the most informative ones first: the plot shows the first eight.
PAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        (GROUPS, UNIFORM), (GAUSSIAN, UNIFORM), (LCB, BEST), (GAUSSIAN, BEST), ("none", UNIFORM),
        ("none", BEST), (GROUPS, "frontier"), (GROUPS, DYNAMIC), (TABLE, BEST), (HISTORY_TABLE, BEST), (LCB, UNIFORM),
        (HISTORY, BEST), (HISTORY, UNIFORM), ("none", "frontier"), (GAUSSIAN, "frontier"),
        (GAUSSIAN, "variance"), ("spo", "spo"), (TABLE, UNIFORM), ("batch_mean", UNIFORM), ("ppo", UNIFORM),
        ("spo", UNIFORM), (LCB, "frontier"), (TEXT, "frontier"), (GROUPS, BEST), (TEXT, BEST), ("batch_mean", BEST),
        ("ppo", BEST), ("spo", BEST),
    ),
    "again": (
        (GROUPS, UNIFORM), (LCB, BEST), (LCB, UNIFORM), ("spo", "spo"), (GROUPS, "frontier"), (LCB_TABLE, BEST),
    ),
    "long": ((GROUPS, UNIFORM), (LCB, BEST), ("none", UNIFORM), ("none", BEST)),
    "unequal": ((GROUPS, UNIFORM), (UNEQUAL, UNIFORM), (GROUPS, BEST), (UNEQUAL, BEST)),
    "target": (
        (OPTIMAL, BEST), (OPTIMAL, "frontier"), (OPTIMAL_LCB, BEST), (MEAN_OPTIMAL, BEST), (OPTIMAL, UNIFORM),
    ),
    "alike": ((GROUPS, UNIFORM), (GAUSSIAN, UNIFORM), (LCB, UNIFORM), (LCB, BEST)),
}  # fmt: skip
# At their best rates in the table of the whole study.
PAIRS["judge"] = (*PAIRS["target"], ("none", BEST), (GROUPS, UNIFORM), (LCB, BEST))
RATES, ONE_RATE, LONG = [3e-4, 6e-4, 9e-4], [6e-4], 4  # LONG: how many times as long
SEEDS, FURTHER_SEEDS = [0, 1, 2], [3, 4, 5, 6, 7, 8]
ENTROPIES = 4  # logged values that the entropy at the end is the mean of


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the study.

    Attributes:
        budget: rollouts per run.
        batch: rollouts per step.
        prompts: number of prompts that are trained on.
        table_rollouts: rollouts per prompt for the value table.
        every: rollouts between measurements.
        held_out: number of prompts of each family that accuracy is measured on.
        samples: rollouts for each of these.
        warm_start: number of supervised steps.
        task: name of one of `TASKS`.
    """

    budget: int = 25_600
    batch: int = 64
    prompts: int = 1_024
    table_rollouts: int = 8
    every: int = 2_560
    held_out: int = 200
    samples: int = 8
    warm_start: int = 1_500
    task: str = "mixed"


class MeasuredToTheBudget(Measured):
    """Measures after every `every` rollouts, and ends the run after `budget`. A step may sample more than a batch."""

    def __init__(self, trainer: BasisTrainer, score: Any, every: int, budget: int) -> None:
        super().__init__(trainer, score, every)
        self.budget, self._due = budget, every

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        drawn = self.trainer.spending.drawn[0]
        if drawn >= self._due:
            self._measure(state.global_step)
            self._due = (drawn // self.every + 1) * self.every
        if drawn >= self.budget:
            control.should_training_stop = True


def prompts_of(scale: Scale) -> tuple[Dataset, dict[str, Dataset]]:
    """The prompts to train on and the held-out ones, the same for every run."""
    return datasets(TASKS[scale.task], scale.prompts, scale.held_out)


def prepare(scale: Scale, seed: int, folder: Path) -> None:
    """Make the seed's warm start unless it exists."""
    warm_model(prompts_of(scale)[0], scale.task, seed, folder / "warm_start", scale.warm_start)


def loaded(folder: Path) -> tuple[Any, Any]:
    """The warm-started model and its tokenizer."""
    start = folder / "warm_start"
    return AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32), AutoTokenizer.from_pretrained(start)


def table_cost(scale: Scale, seed: int, folder: Path) -> dict[str, Any]:
    """Make the seed's value table in ``values`` unless it exists; returns what it cost."""

    def make() -> dict[str, Any]:
        model, tokenizer = loaded(folder)
        prompts, began = prompts_of(scale)[0], time.process_time()
        torch.manual_seed(seed)
        rewards = draw(model, tokenizer, prompts, scale.table_rollouts, reward, None, TOKENS)
        by_id = dict(zip(prompts["prompt_id"], rewards.astype(float).tolist(), strict=True))
        ValueTable.from_rewards(by_id, reward_range=(0.0, 1.0)).save(folder / "values")
        return {"rollouts": rewards.size, "cpu": time.process_time() - began}

    shared = ("prompts", "table_rollouts", "warm_start", "task")
    settings = {"seed": seed, **{key: getattr(scale, key) for key in shared}}
    cost: dict[str, Any] = kept(folder / "values.json", settings, make)[0]
    return cost


def scores_of(model: Any, tokenizer: Any, sets: dict[str, Dataset], samples: int, judged: str) -> dict[str, float]:
    """Accuracy at temperature 1 on each set under its name, and ``pass@samples JUDGED`` of the set `judged`.

    Every call uses the same random numbers, and restores the state of the generator.
    """
    scores = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, prompts in sets.items():
            rewards = draw(model, tokenizer, prompts, samples, reward, None, TOKENS)
            scores[name] = float(rewards.mean())
            if name == judged:
                scores[f"pass@{samples} {name}"] = float(rewards.max(axis=1).mean())
    return scores


def baseline_of(row: str, folder: Path) -> Baseline:
    """The baseline of a row; those of `TABLES` read the seed's value table."""
    settings: dict[str, Any] = {"values": folder / "values"} if row in TABLES else {}
    if ROWS[row][0] == "basis_history":
        settings["target"] = "optimal_token" if row == OPTIMAL_TOKEN else "value"
    if row in (OPTIMAL, OPTIMAL_LCB, MEAN_OPTIMAL):
        settings["target"] = "optimal"
    if row in (TEXT, LCB_TEXT):
        settings["prior"] = "text"
    if row in (GAUSSIAN, HISTORY_TABLE, TEXT):
        settings["belief"] = "gaussian"
    if row in (LCB, LCB_TABLE, LCB_TEXT, OPTIMAL_LCB):
        settings["lcb"] = 1.0
    return build_baseline(ROWS[row][0], **settings)


def sampler_of(name: str) -> PromptSampler:
    """The prompt sampler with one of the names of `SAMPLERS`."""
    kind, _, exponents = name.partition(" ")
    numbers = map(float, exponents.split(":") if exponents else ())
    settings = dict(zip(("hard", "easy", "floor"), numbers, strict=False))
    return build_sampler(kind, **settings)


def run(scale: Scale, row: str, sampler: str, rate: float, seed: int, output: Path) -> dict[str, Any]:
    """Train once; returns the columns of the table: curves of the scores, and what was spent and drawn in total."""
    folder, task = output / f"seed{seed}", TASKS[scale.task]
    prepare(scale, seed, folder)
    cost = table_cost(scale, seed, folder) if row in TABLES else None
    (prompts, held_out), drawn = prompts_of(scale), dict.fromkeys(task.shares, 0)
    model, tokenizer = loaded(folder)
    trainer = trainer_for(
        model, tokenizer, prompts, baseline_of(row, folder), folder / "run", counting(drawn),
        prompt_sampler=sampler_of(sampler), num_generations=ROWS[row][1], max_generations=MOST.get(row),
        per_device_train_batch_size=scale.batch,
        steps_per_generation=1, max_steps=scale.budget // scale.batch, learning_rate=rate, seed=seed,
        max_completion_length=TOKENS, logging_steps=max(1, scale.every // scale.batch // 4),
    )  # fmt: skip
    # The trainer has tried the reward on some rows.
    drawn.update(dict.fromkeys(drawn, 0))

    def score(policy: Any) -> dict[str, float]:
        return scores_of(policy, tokenizer, held_out, scale.samples, task.judged)

    points = measured_training(trainer, MeasuredToTheBudget(trainer, score, scale.every, scale.budget))
    # When a run ends at its budget between two logged lines, its last line is incomplete.
    logged = [entry for entry in trainer.state.log_history if {"reward", "grad_norm"} <= entry.keys()]
    found = {
        "rollouts": [point.rollouts for point in points],
        "scores": {name: [point.scores[name] for point in points] for name in points[0].scores},
        "drawn": drawn,
        "entropy": mean(entry["entropy"] for entry in logged[-ENTROPIES:]),
        "cpu": points[-1].cpu,
        "table": cost,
    }
    return {key: rounded(value) for key, value in found.items()}


def pairs(part: str, rows: list[str] | None, samplers: list[str] | None) -> list[tuple[str, str]]:
    """The rows with their samplers: those of `PAIRS`, or each of `rows` with each of `samplers` if one is given.

    ``dynamic`` is only for groups, since it needs their variance.
    """
    if rows is None and samplers is None:
        return [*PAIRS[part]]
    rows, samplers = rows or list(ROWS), samplers or list(SAMPLERS)
    return [(row, sampler) for sampler in samplers for row in rows if sampler != DYNAMIC or ROWS[row][1] > 1]


def best_rates(row: str, sampler: str) -> list[float]:
    """The rate that suits a row best among the runs that are stored for choosing it."""
    _, runs = read_table(RESULTS / "selection_study.json")
    _, others = read_table(RESULTS / "selection_study_target.json")
    lines = report.summary([*runs, *others], TASKS[Scale.task].judged)
    return [
        line["learning_rate"] for line in lines if line["best"] and (line["row"], line["sampler"]) == (row, sampler)
    ]


def planned(scale: Scale, options: argparse.Namespace) -> list[Planned]:
    """All requested runs: the first row at all rates and with all seeds, then the next row."""
    found = []
    for row, sampler in pairs(options.part, options.rows, options.samplers):
        for rate in best_rates(row, sampler) if options.judge else options.rates:
            for seed in options.seeds:
                labels = {"row": row, "sampler": sampler, "learning_rate": rate, "seed": seed}
                name = "-".join((row, sampler, f"{rate:g}", f"seed{seed}")).replace(", ", "-").replace(" ", "-")
                file = options.output / f"{name.replace(':', '-')}.json"
                make = partial(run, scale, row, sampler, rate, seed, options.output)
                found.append(Planned(labels, file, {**dataclasses.asdict(scale), **labels}, make))
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the options, and fill in the defaults that depend on the study."""
    parser = study_parser(__doc__, "selection_study")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--again", action="store_true", help=f"fewer rows, and seeds {FURTHER_SEEDS}")
    kinds.add_argument("--long", action="store_true", help=f"train on {LONG} times as many rollouts, with fewer rows")
    kinds.add_argument("--unequal", action="store_true", help="equal groups, and groups divided by the belief")
    kinds.add_argument("--target", action="store_true", help="rows with the baseline of least variance")
    kinds.add_argument("--judge", action="store_true", help=f"these at their best rates, and seeds {FURTHER_SEEDS}")
    kinds.add_argument("--task", choices=list(TASKS), default=Scale.task)
    parser.add_argument("--budget", type=int, help=f"rollouts per run ({Scale.budget}; {LONG} times that with --long)")
    parser.add_argument(
        "--rates", type=float, nargs="+", help=f"({RATES}; with --long, --unequal and --task alike {ONE_RATE})"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help=f"({SEEDS}; with --again {FURTHER_SEEDS})")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="(those of the study)")
    parser.add_argument("--samplers", nargs="+", help="names of prompt samplers: " + ", ".join(SAMPLERS))
    parser.add_argument("--runs", type=int, help="stop after this many new runs")
    parser.add_argument("--report", action="store_true", help="print and plot the stored table, and train nothing")
    options = parser.parse_args(argv)
    alike = options.task if options.task != Scale.task else ""
    parts = ("again", "long", "unequal", "target", "judge")
    options.part = next((each for each in parts if getattr(options, each)), alike)
    options.rates = options.rates or (ONE_RATE if options.part in ("long", "unequal", "alike") else RATES)
    options.seeds = options.seeds or (FURTHER_SEEDS if options.again or options.judge else SEEDS)
    options.budget = options.budget or Scale.budget * (LONG if options.long else 1)
    options.study = "_".join(filter(None, ("selection_study", options.part)))
    return options


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the study; returns its runs."""
    options = parse(argv)
    flags = {"": [], "alike": ["--task", "alike"]}
    whole = parse(flags.get(options.part, [f"--{options.part}"]))
    whole.report = options.report
    placed(options, whole)
    every = Scale.every * (2 if options.long else 1)
    scale = Scale(budget=options.budget, task=options.task, every=every)
    if options.quick:
        scale = Scale(
            budget=64, batch=16, prompts=32, table_rollouts=2, every=32, held_out=10, samples=2, warm_start=3,
            task=options.task,
        )  # fmt: skip
    one_thread()
    judged = TASKS[scale.task].judged
    if options.report:
        _, runs = read_table(RESULTS / f"{options.study}.json")
    else:
        runs, facts = kept_runs(planned(scale, options), options.runs)
        save_table(options.study, {**facts, "scale": dataclasses.asdict(scale)}, runs, options.results)
    lines = report.summary(runs, judged)
    print(report.table(lines))
    report.draw(runs, lines, judged, scale.samples, options.results / f"{options.study}.png")
    return runs


if __name__ == "__main__":
    main()
