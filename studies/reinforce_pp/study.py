"""Does normalising over the whole batch generalise better than normalising over each group?

    python -m studies.reinforce_pp.study [--seeds 0 1] [--parts small knights] [--runs N] [--quick]

The paper of REINFORCE++ says that it does (Table 2, Fig. 4). This study checks it on small models, with 8 rollouts per
prompt and no KL:

- ``small`` (Table 2): the quickstart's model is trained on 30 problems for many passes. Measured are the accuracy on
  them and on held-out problems, and pass@1 and pass@16 at temperature 1.
- ``knights`` (Fig. 4; the paper's Table 3 is of a 7B model on MATH): knights-and-knaves puzzles of reasoning-gym, in
  the notation of `studies.reinforce_pp.knights`. The supervised warm start of a small model has puzzles with two and
  three people and a few with four and five; reinforcement learning has puzzles with two to four. Measured is the
  accuracy for two to five.

Results: ``studies/results/reinforce_pp_study.json`` and ``.png``, but only for the whole study with its default
settings. Runs that are already in the output folder (``runs/reinforce_pp_study``) are not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM, set_seed

from basis_rl import BasisConfig, BasisTrainer
from basis_rl.data import load_prompts
from basis_rl.functional.passk import pass_at_k
from basis_rl.recipe.file import parse_recipe
from basis_rl.rewards import MathVerifyReward
from benchmarks.common import one_thread, save
from examples.quickstart.warm_start import build_model, warm_start
from studies import drawing
from studies.reinforce_pp import knights
from studies.runs import Planned, kept_runs, placed, study_parser
from studies.small_policy import draw as draw_rewards
from studies.training import RECIPE, greedy, measured_training, quickstart_model, started

ROWS = ("grpo", "reinforce_pp", "reinforce_pp_baseline")


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the study. The prefixes `small_` and `knights_` name its parts.

    Attributes:
        steps: number of generation batches, with 8 rollouts per prompt and two updates each.
        every: generation batches between measurements.
        problems: number of sums that are drawn; a tenth of them is held out.
        small_prompts: sums that are trained on; every batch has all of them.
        measured: number of held-out problems, and of puzzles for each number of people.
        samples: rollouts per problem, for pass@k.
        knights_prompts: training puzzles for each number of people; a batch has 32 puzzles.
        knights_warm_start: maximum number of supervised steps.
        learning_rate: learning rate of all rows.
        warm_start: share of right answers, and maximum number of steps, at which the warm start on sums ends.
    """

    steps: int = 60
    every: int = 6
    problems: int = 20_000
    small_prompts: int = 30
    measured: int = 200
    samples: int = 16
    knights_prompts: int = 600
    knights_warm_start: int = 400
    learning_rate: float = 1e-4
    warm_start: tuple[float, int] = (0.45, 3000)


def train(
    row: str, seed: int, scale: Scale, model: Path, rows: Dataset, sets: dict[str, Dataset], reward: Any, prompts: int,
    length: int, folder: Path,
) -> tuple[BasisTrainer, dict[str, Any]]:  # fmt: skip
    """Run one training; returns the trainer, and the measurements and mean training rewards as columns."""
    args = BasisConfig(
        output_dir=str(folder), num_generations=8, per_device_train_batch_size=4 * prompts, steps_per_generation=2,
        gradient_accumulation_steps=1, max_steps=2 * scale.steps, max_completion_length=length, seed=seed,
        learning_rate=scale.learning_rate, lr_scheduler_type="constant", logging_steps=2 * scale.every,
        save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    trainer = BasisTrainer(
        model=AutoModelForCausalLM.from_pretrained(model), reward_funcs=reward, args=args, train_dataset=rows,
        baseline=row, objective="grpo", processing_class=tokenizer,
    )  # fmt: skip
    points, log = measured_training(trainer, greedy(trainer, sets, reward, length), 2 * scale.every)
    return trainer, {
        "responses": [point["responses"] for point in points],
        "cpu": [round(point["cpu"], 2) for point in points],
        "accuracy": {name: [round(point["scores"][name], 4) for point in points] for name in sets},
        "training_reward": [round(entry["reward"], 4) for entry in log if "reward" in entry],
    }


def pass_at(rewards: Sequence[Sequence[float]], ks: Sequence[int]) -> dict[str, float]:
    """Mean over problems of the unbiased pass@k of their 0/1 rewards, for each k."""
    right = torch.tensor([sum(row) for row in rewards])
    return {f"pass@{k}": float(pass_at_k(len(rewards[0]), right, k).mean()) for k in ks}


def small(row: str, seed: int, scale: Scale, models: Path) -> dict[str, Any]:
    """One run on a few sums."""
    recipe = parse_recipe([RECIPE, "--dataset_kwargs.size", str(scale.problems)])
    model = models / f"seed{seed}" / "warm_start"
    until, max_steps = scale.warm_start
    everything = load_prompts(recipe.data, conversational=True)
    quickstart_model(everything, seed, model, until=until, max_steps=max_steps)
    problems = everything.select(range(scale.small_prompts))
    held_out = load_prompts(recipe.data, conversational=True, held_out=True)
    held_out = held_out.select(range(min(scale.measured, len(held_out))))
    sets, reward = {"train": problems, "held_out": held_out}, MathVerifyReward()
    prompts, length = scale.small_prompts, recipe.args.max_completion_length
    trainer, result = train(row, seed, scale, model, problems, sets, reward, prompts, length, models / "run")
    for name, chosen in sets.items():
        rewards = draw_rewards(trainer.model, trainer.processing_class, chosen, scale.samples, reward, name, length)
        result[f"{name}_sampled"] = pass_at(rewards.tolist(), (1, scale.samples))
    return result


def knights_model(scale: Scale, seed: int, folder: Path, training: dict[int, list[tuple[str, str]]]) -> None:
    """Ensure that `folder` has a word-level model that has seen puzzles of two and three people, and a few of more."""
    seen = [row for people, rows in training.items() for row in (rows if people < 4 else rows[: len(rows) // 8])]
    dataset = knights.dataset(seen)
    settings: dict[str, Any] = {"until": 0.5, "max_steps": scale.knights_warm_start}

    def make() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
        set_seed(seed)
        tokenizer = knights.tokenizer(max(training))
        model = build_model(tokenizer)
        warm_start(model, tokenizer, dataset, **settings)
        return model, tokenizer

    started(folder, dataset, {"policy": "knights", "seed": seed, **settings}, make)


def of_knights(row: str, seed: int, scale: Scale, models: Path) -> dict[str, Any]:
    """One run on knights and knaves; accuracy by number of people."""
    training, measured = knights.split((2, 3, 4, 5), scale.knights_prompts, scale.measured, seed)
    model = models / f"seed{seed}" / "knights"
    knights_model(scale, seed, model, training)
    rows = knights.dataset([row for people in (2, 3, 4) for row in training[people]])
    sets = {str(people): knights.dataset(found) for people, found in measured.items()}
    return train(row, seed, scale, model, rows, sets, knights.reward, 32, 9, models / "run")[1]


PARTS = {"small": small, "knights": of_knights}


def last(values: Sequence[float], count: int = 3) -> float:
    """Mean of the last `count` values."""
    return mean(values[-count:])


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each part and row: for each set its start and the mean of its last three measurements."""
    lines = []
    for part, row in dict.fromkeys((run["part"], run["row"]) for run in runs):
        own = [run for run in runs if (run["part"], run["row"]) == (part, row)]
        line: dict[str, Any] = {"part": part, "row": row, "seeds": [run["seed"] for run in own]}
        for name in own[0]["accuracy"]:
            line[name] = {
                "start": mean(run["accuracy"][name][0] for run in own),
                "final": mean(last(run["accuracy"][name]) for run in own),
                "finals": [last(run["accuracy"][name]) for run in own],
            }
        line["training_reward"] = mean(last(run["training_reward"]) for run in own)
        for name in ("train_sampled", "held_out_sampled"):
            if name in own[0]:
                line[name] = {key: mean(run[name][key] for run in own) for key in own[0][name]}
        lines.append(line)
    return lines


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot accuracy over rollouts: on the trained and the held-out sums, then for each number of people.

    Each row has its colour, and each seed its line style.
    """
    shown = [(part, name) for part in PARTS for run in runs if run["part"] == part for name in run["accuracy"]]
    shown = list(dict.fromkeys(shown))
    seeds = sorted({run["seed"] for run in runs})
    titles = {"train": "30 problems: themselves", "held_out": "30 problems: held-out ones"}
    columns = min(3, len(shown))
    with drawing.panels(path, -(-len(shown) // columns), columns, width=4.2) as axes:
        for axis, (part, name) in zip(axes, shown, strict=False):
            drawing.title(axis, titles.get(name, f"knights and knaves: {name} people"), "rollouts", "")
            for run in runs:
                if run["part"] == part:
                    look = drawing.style(ROWS.index(run["row"]))
                    look["linestyle"] = drawing.LINES[seeds.index(run["seed"]) % len(drawing.LINES)]
                    label = f"{run['row']}, seed {run['seed']}"
                    axis.plot(run["responses"], run["accuracy"][name], label=label, **look)
            drawing.thousands(axis)
            drawing.percent(axis)
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        drawing.beside(axes[columns - 1])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = study_parser(__doc__, "reinforce_pp_study", PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--learning_rate", type=float, default=Scale.learning_rate)
    parser.add_argument("--runs", type=int, help="stop after this many new runs")
    return parser.parse_args(argv)


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Print the `summary`."""
    for line in lines:
        told = [
            f"{k} {v['start']:.1%} -> {v['final']:.1%}" for k, v in line.items() if isinstance(v, dict) and "start" in v
        ]
        passed = [f"{k} {v}" for k, v in line.items() if k.endswith("_sampled")]
        print(f"{line['part']:8} {line['row']:22} reward {line['training_reward']:.3f}  {'  '.join([*told, *passed])}")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the study; returns its results."""
    options = placed(parse(argv), parse([]))
    scale = Scale(learning_rate=options.learning_rate)
    if options.quick:
        scale = Scale(
            steps=2, every=1, problems=400, small_prompts=2, measured=6, samples=2, knights_prompts=16,
            knights_warm_start=3, warm_start=(0.45, 3),
        )  # fmt: skip
    rate = "" if scale.learning_rate == Scale.learning_rate else f"-{scale.learning_rate:g}"
    one_thread()
    planned = [
        Planned(
            {"part": part, "row": row, "seed": seed}, options.output / f"{part}-{row}{rate}-seed{seed}.json",
            dataclasses.asdict(scale), partial(PARTS[part], row, seed, scale, options.output),
        )
        for part, seed, row in itertools.product(options.parts, options.seeds, ROWS)
    ]  # fmt: skip
    runs, told = kept_runs(planned, options.runs)
    lines = summary(runs)
    show(lines)
    results = {**told, "scale": dataclasses.asdict(scale), "summary": lines, "runs": runs}
    name = f"reinforce_pp_study{rate}"
    draw(runs, options.results / f"{name}.png")
    save(name, results, options.results)
    return results


if __name__ == "__main__":
    main()
