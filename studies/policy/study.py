"""Does one rollout per prompt with BASIS train as well as eight?

    python -m studies.policy.study [--worked] [--sampler] [--seeds 0 1 2] [--runs N] [--report] [--quick]

The paper of BASIS (Table 1, Figs. 5 to 7) says that it does, and faster. This study checks it on a small model: the
quickstart's model, with sums and differences of numbers of one and two digits. For each seed there is ONE warm start
and ONE value table, which all its runs share. Every run samples the same number of rollouts in total and per step: 64
prompts x 1 or 8 x 8. As in the paper there are two updates per batch, a constant learning rate that is the same for
all, and no KL. The learning rate matters more than the estimator, so the first objective is run with those of
``--rates`` as well. With ``--worked`` the policy writes steps of its own choice before it answers
(`studies.worked_sums`). With ``--sampler`` the rows are `basis_history` with Gaussian beliefs, and with Beta beliefs
and a lower confidence bound, each with prompts drawn uniformly and by ``frontier``, to see what selection costs where
all prompts are alike. Accuracy is greedy, on held-out problems. Times are processor seconds of this process without the
measurements.

Results: the tables ``studies/results/policy_study*.json``, with a plot, but only for the whole study with its default
settings. A run that is in the output folder (``runs/policy_study``) is not repeated, so the command can be resumed
after an interruption, or make only ``--runs`` new runs at a time. ``--report`` prints and plots the table that is
stored, and trains nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset

from basis_rl.cli.main import main as basis_rl
from basis_rl.data import load_prompts
from basis_rl.engine import Sampling, prompt_tokens, sample
from basis_rl.recipe.build import build_trainer
from basis_rl.recipe.file import parse_recipe
from basis_rl.rewards import MathVerifyReward
from benchmarks.common import one_thread
from studies import small_policy, worked_sums
from studies.policy import report as policy_report
from studies.runs import RESULTS, Planned, kept, kept_runs, placed, read_table, save_table, study_parser
from studies.training import RECIPE, Measured, measured_training, quickstart_model

OBJECTIVES = ("grpo", "gpg", "gspo")
# A row of the comparison: its name, and what it changes in the recipe. "{values}" is the seed's value table.
ROWS: dict[str, dict[str, str]] = {
    "basis": {"baseline": "basis", "baseline_kwargs": '{"values": "{values}"}', "num_generations": "1"},
    "grpo G=8": {"baseline": "grpo", "baseline_kwargs": "{}", "num_generations": "8"},
    "none": {"baseline": "none", "baseline_kwargs": "{}", "num_generations": "1"},
    "batch_mean": {"baseline": "batch_mean", "baseline_kwargs": "{}", "num_generations": "1"},
    "ppo": {"baseline": "ppo", "baseline_kwargs": "{}", "num_generations": "1"},
}
# Without a table. Gaussian beliefs and the value as the target were the defaults when this was measured.
GAUSSIAN, LCB = "basis_history, gaussian", "basis_history, lcb"
HISTORY = {**ROWS["none"], "baseline": "basis_history"}
ROWS[GAUSSIAN] = {**HISTORY, "baseline_kwargs": '{"belief": "gaussian", "target": "value"}'}
ROWS[LCB] = {**HISTORY, "baseline_kwargs": '{"lcb": 1, "target": "value"}'}
# Pairs with and without a prompt sampler: those of ``--sampler``.
FRONTIER = {"prompt_sampler": "frontier", "prompt_sampler_kwargs": '{"hard": 2, "easy": 1}'}
SAMPLED = {
    f"{GAUSSIAN}, frontier": {**ROWS[GAUSSIAN], "prompt_sampler": "frontier"},
    f"{LCB}, frontier 2:1": {**ROWS[LCB], **FRONTIER},
}
ROWS.update(SAMPLED)
PAIRS = [GAUSSIAN, f"{GAUSSIAN}, frontier", LCB, f"{LCB}, frontier 2:1"]
# Not in the paper: run only with the first objective and the common learning rate.
ONCE = ("ppo", *PAIRS)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the study.

    Attributes:
        budget: rollouts per run.
        batch: rollouts per step; each of its two updates has half of them.
        problems: number of problems that are drawn; a tenth of them is held out.
        prompts: number of problems that are trained on.
        table_rollouts: rollouts per prompt for the value table.
        every: steps between measurements.
        held_out: number of problems that accuracy is measured on.
        learning_rate: learning rate of all rows, except for the runs of ``--rates``.
        warm_start: share of right answers, and maximum number of steps, at which the warm start ends.
        worked: whether to use the policy of `studies.worked_sums` instead of the quickstart's.
    """

    budget: int = 12_800
    batch: int = 64
    problems: int = 20_000
    prompts: int = 1_536
    table_rollouts: int = 8
    every: int = 10
    held_out: int = 400
    learning_rate: float = 1e-4
    warm_start: tuple[float, int] = (0.45, 3000)
    worked: bool = False


def settings(scale: Scale, objective: str, row: str, seed: int, folder: Path) -> list[str]:
    """The recipe's arguments for one run; those of `ROWS` take precedence."""
    own = {key: value.replace("{values}", str(folder / "values")) for key, value in ROWS[row].items()}
    common = {
        "model_name_or_path": folder / "warm_start",
        "output_dir": folder / "run",
        "overwrite_output_dir": True,
        "objective": objective,
        "seed": seed,
        "per_device_train_batch_size": scale.batch // 2,
        "max_steps": 2 * (scale.budget // scale.batch),
        "learning_rate": scale.learning_rate,
        "lr_scheduler_type": "constant",
        "max_completion_length": worked_sums.TOKENS if scale.worked else small_policy.TOKENS,
        "dataset_kwargs.size": scale.problems,
        "max_train_samples": scale.prompts,
        "values_num_rollouts": scale.table_rollouts,
        "values_batch_size": min(512, scale.prompts * scale.table_rollouts),
        "eval_strategy": "no",
        "eval_on_start": False,
        "logging_steps": scale.every,
        "disable_tqdm": True,
    }
    return [RECIPE, *(word for key, value in {**common, **own}.items() for word in (f"--{key}", str(value)))]


def prepare(scale: Scale, seed: int, folder: Path) -> dict[str, Any]:
    """Make the seed's warm start and value table unless they exist; returns the cost of the table."""
    settings_of = ("problems", "prompts", "table_rollouts", "warm_start", "worked")
    key = {name: value for name, value in dataclasses.asdict(scale).items() if name in settings_of}

    def make() -> dict[str, Any]:
        argv = settings(scale, "grpo", "basis", seed, folder)
        until, max_steps = scale.warm_start
        data = dataclasses.replace(parse_recipe(argv).data, max_train_samples=None)
        make_model = worked_sums.worked_model if scale.worked else quickstart_model
        problems = load_prompts(data, conversational=True)
        make_model(problems, seed, folder / "warm_start", until=until, max_steps=max_steps)
        began = time.process_time()
        if basis_rl(["values", *argv]):
            raise SystemExit("The value table was not built.")
        return {"rollouts": scale.prompts * scale.table_rollouts, "cpu": time.process_time() - began}

    return kept(folder / "prepared.json", key, make)[0]


def accuracy(model: Any, tokenizer: Any, problems: Dataset, reward: Any, tokens: int) -> float:
    """Mean reward of one greedy rollout of each problem; one that could not be scored counts as wrong."""
    prompts = [prompt_tokens(prompt, tokenizer, {}) for prompt in problems["prompt"]]
    drawn = dict(sample(model, tokenizer, prompts, Sampling(tokens, temperature=0.0)))
    answers = [drawn[index][0].text for index in range(len(prompts))]
    # In one call, so that grading processes work in parallel.
    rewards = reward(prompts=list(problems["prompt"]), completions=answers, solution=list(problems["solution"]))
    return sum(r or 0.0 for r in rewards) / len(rewards)


def run(scale: Scale, objective: str, row: str, seed: int, output: Path) -> dict[str, Any]:
    """Train once; returns the columns of the table."""
    folder, uses_table = output / f"seed{seed}", "{values}" in str(ROWS[row])
    cost = prepare(scale, seed, folder)
    recipe = parse_recipe(settings(scale, objective, row, seed, folder))
    everything = dataclasses.replace(recipe.data, max_train_samples=None)
    held_out = load_prompts(everything, conversational=True, held_out=True)
    held_out = held_out.select(range(min(scale.held_out, len(held_out))))
    trainer, reward, tokens = build_trainer(recipe), MathVerifyReward(), recipe.args.max_completion_length

    def score(model: Any) -> dict[str, float]:
        tokenizer: Any = trainer.processing_class
        return {"held_out": accuracy(model, tokenizer, held_out, reward, tokens)}

    points = measured_training(trainer, Measured(trainer, score, 2 * scale.every))
    return {
        "rollouts": [point.rollouts for point in points],
        "accuracy": [round(point.scores["held_out"], 4) for point in points],
        "cpu": round(points[-1].cpu, 2),
        "table": cost if uses_table else None,
    }


def planned(
    objectives: list[str], rows: list[str], seeds: list[int], rate: float, rates: list[float]
) -> list[tuple[str, str, int, float]]:
    """Objective, row, seed and learning rate of each run: all at `rate`, then the first objective at all `rates`."""
    at_one = [(objective, row, seed, rate) for objective in objectives for seed in seeds for row in rows]
    at_others = [(objectives[0], row, seed, r) for r in rates if r != rate for seed in seeds for row in rows]
    return [
        (objective, row, seed, r)
        for objective, row, seed, r in [*at_one, *at_others]
        if row not in ONCE or (objective, r) == (objectives[0], rate)
    ]


def asked(scale: Scale, objective: str, row: str, seed: int, rate: float, output: Path) -> Planned:
    """The run of one entry of `planned`, with its file in `output`."""
    own = dataclasses.replace(scale, learning_rate=rate)
    labels = {"objective": objective, "row": row, "seed": seed, "learning_rate": rate}
    file = output / f"{objective}-{row.replace(' ', '-')}-{rate:g}-seed{seed}.json"
    kept_for = {**dataclasses.asdict(own), "recipe": ROWS[row]}
    return Planned(labels, file, kept_for, partial(run, own, objective, row, seed, output))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the options, and fill in the defaults that depend on ``--worked``."""
    parser = study_parser(__doc__, "policy_study")
    parser.add_argument("--budget", type=int, default=Scale.budget, help="rollouts per run")
    parser.add_argument("--learning_rate", type=float, default=Scale.learning_rate)
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[1e-5, 3e-5, 3e-4], help="further rates for the first objective"
    )
    parser.add_argument(
        "--start", type=float, help="share of right answers that ends the warm start (0.45; with --worked 0.25)"
    )
    parser.add_argument("--worked", action="store_true", help="use a policy that adds in steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, help="(all; with --worked only grpo)")
    parser.add_argument("--sampler", action="store_true", help="only basis_history, with and without a sampler")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS))
    parser.add_argument("--runs", type=int, help="stop after this many new runs")
    parser.add_argument("--report", action="store_true", help="print and plot the stored table, and train nothing")
    options = parser.parse_args(argv)
    if options.start is None:
        options.start = 0.25 if options.worked else 0.45
    options.objectives = options.objectives or (["grpo"] if options.worked or options.sampler else list(OBJECTIVES))
    default = PAIRS if options.sampler else [row for row in ROWS if row not in (LCB, *SAMPLED)]
    options.rows = options.rows or default
    options.study += ("_worked" if options.worked else "") + ("_sampler" if options.sampler else "")
    return options


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the study; returns its runs."""
    options = parse(argv)
    placed(options, parse([f"--{name}" for name in ("worked", "sampler", "report") if getattr(options, name)]))
    scale = Scale(
        budget=options.budget, learning_rate=options.learning_rate, worked=options.worked,
        warm_start=(options.start, 3000),
    )  # fmt: skip
    if options.quick:
        scale = Scale(
            budget=64, batch=16, problems=400, prompts=32, table_rollouts=2, every=2, held_out=20, warm_start=(0.45, 5),
            worked=options.worked,
        )  # fmt: skip
    one_thread()
    if options.report:
        _, runs = read_table(RESULTS / f"{options.study}.json")
    else:
        everything = planned(options.objectives, options.rows, options.seeds, scale.learning_rate, options.rates)
        runs, facts = kept_runs([asked(scale, *each, options.output) for each in everything], options.runs)
        save_table(options.study, {**facts, "scale": dataclasses.asdict(scale)}, runs, options.results)
    print(policy_report.table(policy_report.summary(runs)))
    policy_report.draw(runs, scale.learning_rate, options.results / f"{options.study}.png")
    return runs


if __name__ == "__main__":
    main()
